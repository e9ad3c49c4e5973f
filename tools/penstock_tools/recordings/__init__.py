"""Recordings of a replay queue: its groups in a Parquet file."""
