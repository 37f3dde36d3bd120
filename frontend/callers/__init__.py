"""Who may ask, and how much: keys, what their owners use, and the places that callers share."""
