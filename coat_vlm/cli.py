"""Starts the command line, :mod:`coat_cli.main`, for ``python -m coat_vlm.cli``.

This is the only module of a lower package that names a higher one.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("coat_cli.main", run_name="__main__", alter_sys=True)
