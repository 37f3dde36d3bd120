"""Media of requests: from the text of a URL to pixels in a slot."""
