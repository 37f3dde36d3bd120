"""The tests, and what else verifies: chaos, soak, the simulator, fuzzing, faults. Not installed; run from the root."""
