"""The soak: a live replay under random faults of every kind, for as long as asked.

============ =====================================================================
``plan``     which fault in which order; the seed alone decides
``workload`` the requests: one trace, again and again, half of its blocks new
``settings`` what a run is told, and the two sessions
``driver``   the run: quiet and faulty pieces in turn, and what they came to
``lane``     one fault after the other at one target, counted when it strikes
``target``   a tier of the live engine, as faults see it
``strikes``  how each fault is brought about, and what has to follow
``second``   a second session, whose engine is killed over and over
``child``    that engine's process
``cost``     CPU time of the manager's calls
``watch``    descriptors, memory, names, processes
``report``   the verdict and its JSON
============ =====================================================================

Run it with ``make soak MINUTES=10`` (``tools/soak.py``).
"""
