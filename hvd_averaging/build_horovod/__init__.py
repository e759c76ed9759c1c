"""`python -m hvd_averaging.build_horovod`: Horovod, built against the frameworks of the running interpreter.

Horovod's last release does not compile against today's PyTorch and TensorFlow. This package fetches that release, makes
the few edits it needs (`edits`), compiles a wheel for what it finds here (`environment`, `target`), keeps the wheel for
the next time (`cache`), installs it and proves that it works (`install`, `verify`).

It runs before Horovod exists and so imports nothing but the standard library, and no framework into its own process.
"""
