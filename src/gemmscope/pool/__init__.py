"""Many measurements on many GPUs: units of work, the places that measure them, and the schedule that gives every unit to a place.

A *place* is one GPU: of this machine (`local.py`), or of a Ray cluster (`ray.py`). A *unit* is one whole measurement, in
which both sides of every ratio run on the same GPU. A light process at the place, the *place worker*, runs the unit as a
single-GPU command would, with a measuring process of its own, and sends one outcome back. Whatever dies costs the unit in
flight, which another place repeats.
"""
