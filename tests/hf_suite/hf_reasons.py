"""Reasons why a test that passes with a stock class cannot pass with ours; `make hf-suite` fails for any other."""

from hf_compare import Reasons

STAGES = "each stage has a feature map and keys of its own size, and the test expects one size in all layers"
EXPERTS = "the test looks for a decorator in the text of the model's own file, and the experts are the stock ones"
REASONS: Reasons = {
    ("*-transnext", "test_attention_outputs"): STAGES,
    ("*-transnext", "test_hidden_states_output"): STAGES,
    ("*-qwen3_moe", "test_moe_models_record_router_logits"): EXPERTS,
    ("*-deepseek_v?", "test_moe_models_record_router_logits"): EXPERTS,
}
"""(pattern of case names, pattern of test names) -> reason in one sentence; the first match applies."""
