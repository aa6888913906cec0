"""The version of Stretto; pyproject.toml reads it from here."""

__version__ = "0.1.0"
