"""A real model: sentences embedded by all-MiniLM-L6-v2 against transformers, with mean and norm in plain torch."""

from __future__ import annotations

import torch

from support.minilm import MINILM, minilm_tokenizer, sentences
from support.numerics.encoder_checkpoints import Served, cosines


def parts(texts: list[list[int]], size: int) -> list[list[list[int]]]:
    return [texts[i : i + size] for i in range(0, len(texts), size)]


def reference(texts: list[list[int]]) -> torch.Tensor:
    from transformers import BertModel

    model = BertModel.from_pretrained(MINILM, dtype=torch.float32).eval()
    rows = []
    for part in parts(texts, 25):
        lengths = torch.tensor([len(text) for text in part])
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in part], batch_first=True)
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
        with torch.inference_mode():
            hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
        mean = (hidden * mask[:, :, None]).sum(1) / lengths[:, None]
        rows.append(mean / mean.norm(dim=1, keepdim=True))
    return torch.cat(rows)


def test_two_hundred_sentences_have_the_embeddings_of_transformers() -> None:
    texts = sorted((each.ids for each in minilm_tokenizer().encode_batch(sentences(200))), key=len)
    assert len(texts) == 200 and len(texts[0]) < len(texts[-1])
    expected = reference(texts)
    served = Served(MINILM)
    found = torch.cat([served.outputs(part) for part in parts(texts, 50)])
    assert found.shape == (200, 384)
    assert cosines(found, expected).min() >= 0.9999
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_sentence_is_closer_to_one_that_says_the_same() -> None:
    said = ["A cat is sitting on the mat.", "The cat sits on a rug.", "Interest rates rose again last year."]
    one, same, other = Served(MINILM).outputs([each.ids for each in minilm_tokenizer().encode_batch(said)])
    assert one @ same > one @ other + 0.2
