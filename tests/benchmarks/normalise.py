"""Seconds to explain the 988-key FLUX.1 listing from names and shapes: best and median of 20, as JSON."""

import json
import time
from pathlib import Path
from statistics import median

from difflora.formats.match import explain

LISTING = Path(__file__).parents[1] / "formats" / "keys" / "flux_lora_diffusers_format.json"


def main() -> None:
    shapes = {key: tuple(shape) for key, shape in json.loads(LISTING.read_text())["keys"].items()}
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        found = explain(shapes)
        seconds.append(time.perf_counter() - start)
    times = {"first_s": seconds[0], "best_s": min(seconds), "median_s": median(seconds)}
    print(json.dumps({"keys": len(shapes), "entries": len(found.entries), **times}))


if __name__ == "__main__":
    main()
