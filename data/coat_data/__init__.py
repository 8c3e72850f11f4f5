"""Data of vision-language models: readers, ingestion, mixtures, encoding and loading of samples.

A new format of rows is a reader (``readers/catalogue.py``), a new kind of file a container
(``containers/open.py``). Importing this package loads neither torch nor a decoder.
"""
