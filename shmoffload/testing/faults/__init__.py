"""The fault kit: break tiers, workers, files and answers on purpose, and repeatably.

============ =====================================================================
``control``  tell a ``faulty`` tier, in whatever process, what to do wrong
``tier``     that tier: any real one inside, with faults in front of it
``deaths``   end or stop processes that the caller names
``damage``   what disks do to the files of a ``slab`` or an ``fs`` tier
``link``     late, doubled and lost answers, in the engine's process
============ =====================================================================
"""
