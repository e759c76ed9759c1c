pytest_plugins = ["ranks.plugin"]
