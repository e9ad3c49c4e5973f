"""The receiving side of a weight push, below the engines: the stage, and a receiver for each transport."""
