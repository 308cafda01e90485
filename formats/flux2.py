"""What came after FLUX.1: FLUX.2 dev and klein, FLUX.3, Chroma.  Blocks have no modulation of their own any more."""

from difflora.formats.flux import DEPTHS, DOUBLE, ENDS, SINGLE, WIDTHS
from difflora.formats.rules import Encoder, Family, names, network, square
from difflora.formats.text_encoders import T5_ALONE, llama_like

# BFL's blocks without XLabs' processors, which only FLUX.1 has.
BLOCKS = tuple(rule for rule in (*DOUBLE, *SINGLE) if "processor" not in rule.source)
JOINT = "attn.to_{q,k,v} attn.add_{q,k,v}_proj"
# The original code bases store (shift, scale), diffusers (scale, shift).
SWAP = "final_layer.adaLN_modulation.1 = norm_out.linear : D D / 1 0\n"
_FLUX2 = """
    single_stream_modulation.lin = single_stream_modulation.linear
    double_stream_modulation_{img,txt}.lin = double_stream_modulation_{img,txt}.linear
    {time,guidance}_in.{in,out}_layer = time_guidance_embed.{timestep,guidance}_embedder.linear_{1,2}
    single_blocks.{i}. = single_transformer_blocks.{i}.:
    {linear1,linear2,norm.query_norm,norm.key_norm} = attn.{to_qkv_mlp_proj,to_out,norm_q,norm_k}
    double_blocks.{i}. = transformer_blocks.{i}.:
    {img,txt}_mlp.{0,2} = {ff,ff_context}.linear_{in,out}
    {transformer_blocks,sformer_blocks}.{i}. = transformer_blocks.{i}.:
    attn.to_{q,k,v,out.0,add_out} attn.add_{q,k,v}_proj {ff,ff_context}.linear_{in,out}
    attn.to_qkv = attn.to_q + attn.to_k + attn.to_v : D D D
    attn.to_added_qkv = attn.add_q_proj + attn.add_k_proj + attn.add_v_proj : D D D
"""
_FLUX3 = """
    {txt_in,final_layer.image.linear} = {context_embedder,proj_out}
    final_layer.image.adaLN_modulation.1 = norm_out.linear : D D / 1 0
    {,ref_}time_in.{in,out}_layer = {,target_}timestep_embedder.linear_{1,2}
    emb_in.{image,image_cond} = x_embedders.{image,image_cond}
    {early,single}_stream_modulations.{image,image_cond,txt}.:
    lin = linear
    content_mode_blocks.{image,image_cond}.{i}. = mode_blocks.{image,image_cond}.{i}.:
"""
_FLUX3_BLOCK = """
    {q,k,v}_proj = attn.to_{q,k,v}
    {attn_out,mlp_in,mlp_out} = {attn.to_out.0,ff.linear_in,ff.linear_out}
    norm.{query,key}_norm = attn.norm_{q,k}
    {txt_mode_blocks,single_blocks}.{i}. = {txt_mode_blocks,single_transformer_blocks}.{i}.:
"""
_CHROMA = """
    distilled_guidance_layer.layers.{i}.{in,out}_layer = distilled_guidance_layer.layers.{i}.linear_{1,2}
    distilled_guidance_layer.norms.{i} distilled_guidance_layer.{in,out}_proj
"""
_HIDDEN = (3072, 4096, 6144)  # klein 4B, klein 9B, dev
_WIDTHS = {
    **square("transformer.transformer_blocks.{i}.", JOINT, _HIDDEN),
    **dict.fromkeys(
        names("transformer.transformer_blocks.{i}.", "{ff,ff_context}.linear_in"), ((18432, 24576, 36864), _HIDDEN)
    ),
    "transformer.single_transformer_blocks.{i}.attn.to_qkv_mlp_proj": ((27648, 36864, 55296), _HIDDEN),
    "transformer.single_transformer_blocks.{i}.attn.to_out": (_HIDDEN, (12288, 16384, 24576)),
}
_FLUX3_WIDTHS = square("transformer.single_transformer_blocks.{i}.attn.", "to_{q,k,v}", 3072)
_QWEN3 = Encoder("text_encoder", llama_like("model."), ("te", "te1", "text_encoder", "qwen3_4b", "qwen3_8b"))
_MISTRAL3 = Encoder("text_encoder", llama_like("model.language_model."), ("mistral3_24b",))
_QWEN3_VL = Encoder("text_encoder", llama_like("model.language_model."), ("te", "te1", "text_encoder"))
_MARKS = ("flux-2", "flux.2", "flux2")
_ATTENTION = (rule for rule in DOUBLE if "_attn." in rule.source)

FLUX2 = Family("flux2", "transformer", network(SWAP + _FLUX2, *ENDS, *_ATTENTION), (_QWEN3, _MISTRAL3), _WIDTHS, _MARKS)
FLUX3 = Family(
    "flux3",
    "transformer",
    network(_FLUX3 + 2 * _FLUX3_BLOCK),
    (_QWEN3_VL,),
    _FLUX3_WIDTHS,
    ("flux-3", "flux3"),
)
CHROMA = Family("chroma", "transformer", network(_CHROMA, *BLOCKS, *ENDS), T5_ALONE, WIDTHS, ("chroma",), depths=DEPTHS)
