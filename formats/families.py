"""The model families that are known.  Their order decides nothing but the order of names in messages."""

from difflora.formats.ace_step import ACE_STEP
from difflora.formats.cascade import CASCADE
from difflora.formats.cog import COGVIDEOX, COGVIEW4
from difflora.formats.cosmos import ANIMA, COSMOS, COSMOS2
from difflora.formats.flux import FLUX
from difflora.formats.flux2 import CHROMA, FLUX2, FLUX3
from difflora.formats.hidream import HIDREAM
from difflora.formats.hunyuan import HUNYUAN_DIT, HUNYUAN_IMAGE, HUNYUAN_VIDEO, HUNYUAN_VIDEO15
from difflora.formats.kandinsky import KANDINSKY5
from difflora.formats.krea2 import KREA2
from difflora.formats.ltx import LTX, LTX2
from difflora.formats.minimax_h3 import MINIMAX_H3
from difflora.formats.mmdit import AURAFLOW, QWEN_IMAGE, QWEN_IMAGE21, SD3
from difflora.formats.mochi import MOCHI
from difflora.formats.pixart import PIXART, SANA
from difflora.formats.rules import Family
from difflora.formats.sd import SD1, SD2
from difflora.formats.sdxl import SDXL
from difflora.formats.single_stream import ERNIE_IMAGE, IDEOGRAM4, LUMINA2, Z_IMAGE
from difflora.formats.wan import WAN

FAMILIES: tuple[Family, ...] = (
    *(SD1, SD2, SDXL, FLUX, WAN, LTX, LTX2, HIDREAM, PIXART, SANA, COGVIDEOX, COGVIEW4, MOCHI, CASCADE, KANDINSKY5),
    *(ACE_STEP, FLUX2, FLUX3, CHROMA, SD3, QWEN_IMAGE, QWEN_IMAGE21, AURAFLOW, LUMINA2, Z_IMAGE, IDEOGRAM4),
    *(ERNIE_IMAGE, HUNYUAN_VIDEO, HUNYUAN_VIDEO15, HUNYUAN_IMAGE, HUNYUAN_DIT, KREA2, COSMOS, COSMOS2, ANIMA),
    MINIMAX_H3,
)
