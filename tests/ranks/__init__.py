"""A pytest plugin that runs tests under real ``horovodrun``: ``@pytest.mark.ranks(2, 4)``.

The outer session (``plugin``) starts one launch of ranks per kind of world (``team``, ``launch``), asks all ranks to
run one test at a time (``rank``), and turns what they answer into one ordinary report per test (``verdict``). Nothing
here knows the package under test.
"""
