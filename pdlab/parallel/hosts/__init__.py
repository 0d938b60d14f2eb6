"""Where ranks live."""
