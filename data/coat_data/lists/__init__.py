"""Lists of sources in the forms that people have: one module per form, each gives SourceEntry."""
