"""The socket between the two ends: where it is, who is at its other end, frames in and frames out."""
