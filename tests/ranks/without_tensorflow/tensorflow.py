"""What `import tensorflow` finds in a launch that is for PyTorch: nothing, as where it is not installed.

Otherwise horovodrun itself would import it each time, which takes longer than most tests.
"""

raise ImportError("this launch is for PyTorch only; ask for one with framework='tensorflow'", name="tensorflow")
