"""How Sphinx builds this documentation: `scripts/docs`, where PyTorch, TensorFlow and Horovod are installed."""

import os

# The API reference imports TensorFlow, which is chatty.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import hvd_averaging

project = "hvd_averaging"
release = hvd_averaging.__version__
copyright = "the authors of hvd_averaging, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types are in the text where they matter; with defaults, signatures are long enough
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Raises in fit", "params_style")]

html_theme = "furo"
html_title = "hvd_averaging"
html_show_sphinx = html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["side.css"]
highlight_language = "default"
