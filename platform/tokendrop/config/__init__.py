"""What a run is: frozen dataclasses, read from YAML and checked once."""
