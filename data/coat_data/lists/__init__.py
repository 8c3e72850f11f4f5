"""Lists of sources in the forms that people have; each is read as entries of a recipe."""
