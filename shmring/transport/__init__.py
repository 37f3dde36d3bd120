"""The socket between the two sides: where it is, which process is its peer, frames in and frames out."""
