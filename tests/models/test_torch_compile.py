"""A user's own ``torch.compile`` of a model that Forerun runs too: it traces the whole model, before and after."""

import torch
from support.tiny import build

import forerun


def test_a_model_is_traced_whole_beside_forerun():
    model = build("LlamaForCausalLM", {"num_hidden_layers": 1}, seed=0)
    ids = torch.tensor([[7, 3, 9, 2]])

    def compiled() -> torch.Tensor:
        torch._dynamo.reset()
        whole = torch.compile(model, backend="eager", fullgraph=True)
        with torch.no_grad():
            logits: torch.Tensor = whole(input_ids=ids, use_cache=False).logits
        return logits

    before = compiled()
    text = forerun.Engine(model, "trie").generate(ids, max_new_tokens=4, eos_token_id=None).generated
    assert torch.equal(compiled(), before)
    assert text[0][0] == before[0, -1].argmax()
