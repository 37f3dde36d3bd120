"""What each process of a server has, whatever it serves: options, a log, traces, times, and a supervisor."""
