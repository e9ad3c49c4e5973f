"""The receiving ends of the weight transports, by name, and the stage that runs one beside the serving engine."""
