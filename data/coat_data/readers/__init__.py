"""One module per file format; each turns a row of the format into a :class:`~coat_data.Sample`."""
