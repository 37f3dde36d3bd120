"""The tests, and what else verifies: chaos, soak, the simulator, fuzzing, guards. Not installed; run from the root."""
