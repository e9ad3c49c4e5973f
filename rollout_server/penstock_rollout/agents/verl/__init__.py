"""Runs tool and interaction classes that were written for verl. It never imports verl."""
