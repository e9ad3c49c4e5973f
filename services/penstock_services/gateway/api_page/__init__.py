"""A page on which people read the OpenAPI document and try calls."""
