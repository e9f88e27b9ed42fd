"""The real worker: plans performed with torch on a CPU or a GPU."""

import os

# Read once, when torch loads its OpenMP. Its threads would otherwise spin while they wait for each other, and a decode
# step is hundreds of small parallel regions: whenever another process wants a core, spinning stalls them all.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
