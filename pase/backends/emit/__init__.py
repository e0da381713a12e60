"""Writes plans in the formats of other programs, one module per format. A module that registers a ``Backend`` is found
automatically."""
