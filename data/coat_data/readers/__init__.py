"""Turn raw rows into a :class:`~coat_data.sample.Sample`: one ``Reader`` for each kind of row.

:mod:`coat_data.readers.catalogue` lists them and finds the one that fits a source.
"""
