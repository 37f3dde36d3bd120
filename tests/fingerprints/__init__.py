"""What fingerprints find and what not: altered copies of the sample media, scored against their originals."""
