"""Files from elsewhere: folders of an object store, and models that are fetched once into a folder."""
