"""One module per kind of row; each turns a raw row into a :class:`~coat_data.Sample`.

:mod:`coat_data.readers.catalogue` lists them and finds the one that fits a source.
"""
