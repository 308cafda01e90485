"""The model families that are known.  Their order decides nothing but the order of names in messages."""

from difflora.formats.ace_step import ACE_STEP
from difflora.formats.cascade import CASCADE
from difflora.formats.cog import COGVIDEOX, COGVIEW4
from difflora.formats.flux import FLUX
from difflora.formats.hidream import HIDREAM
from difflora.formats.kandinsky import KANDINSKY5
from difflora.formats.ltx import LTX, LTX2
from difflora.formats.mochi import MOCHI
from difflora.formats.pixart import PIXART, SANA
from difflora.formats.rules import Family
from difflora.formats.sd import SD1, SD2
from difflora.formats.sdxl import SDXL
from difflora.formats.wan import WAN

FAMILIES: tuple[Family, ...] = (
    SD1,
    SD2,
    SDXL,
    FLUX,
    WAN,
    LTX,
    LTX2,
    HIDREAM,
    PIXART,
    SANA,
    COGVIDEOX,
    COGVIEW4,
    MOCHI,
    CASCADE,
    KANDINSKY5,
    ACE_STEP,
)
