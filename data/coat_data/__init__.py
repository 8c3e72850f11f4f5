"""Data of vision-language models: readers, ingestion, mixtures, encoding and loading of samples.

A new format of rows is a reader (``readers/``, listed in ``readers/catalogue.py``); a new kind of
file is a container (``containers/``, found by ``containers/open.py``); a new list of data sets is a
form in ``lists/formats.py``.

Names are imported from their modules, so that ``import coat_data`` does not load torch or a
decoder.
"""
