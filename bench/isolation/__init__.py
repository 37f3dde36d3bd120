"""``bench isolation``: how long one caller waits while another asks for much."""
