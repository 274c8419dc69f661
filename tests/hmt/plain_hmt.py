"""The definition of the single-pass mode in plain loops, for the tests."""

import inspect
import math

import torch


def plain_single(model, row):
    """The definition in `single_pass_hmt.py` for a row, (T,) -> (T, V): no cache, and a mask made in loops.

    One pass reads a segment, with the summary token of the query in the middle. No later token attends to it. With
    `reread=True` there is no mask: the query and the logits of x[:j] come from one pass, the rest from another one
    after the prompt.
    """
    c, memory, backbone = model.config, model.memory, model.backbone
    embed, j, bank, logits, pairs = backbone.get_input_embeddings(), c.summary_length, [], [], []

    def recall(q):
        if not c.recall:
            return bank[-1]
        remembered = torch.cat(bank[-c.memory_size :])
        mean = remembered.mean(0)
        q, keys = (  # at length one
            (x - mean) / ((x - mean).square().sum(1) + 1e-4 * x.square().sum(1)).sqrt()[:, None]
            for x in (q, remembered)
        )
        scores = math.log(1 + len(keys)) * (q @ memory.wq.T) @ (keys @ memory.wk.T).T / memory.log_temperature.exp()
        return scores.softmax(-1) @ remembered

    def read_again(start):
        """Return the latest of the spans of remembered segments with the highest BM25 score for x[:j]."""
        begin = max(0, start - (c.memory_size or start) * c.segment_length)
        stretches = [row[i : i + c.recall_tokens].tolist() for i in range(begin, start, c.recall_tokens)]
        scores = [0.0] * len(stretches)
        query = row[start : start + j].tolist()
        for token in set(query):
            containing = sum(token in x for x in stretches)
            for i, x in enumerate(stretches):
                idf = math.log(1 + (len(stretches) - containing + 0.5) / (containing + 0.5))
                weight = math.exp(-query[::-1].index(token) / 8)
                scores[i] += weight * idf * x.count(token) * 2.2 / (x.count(token) + 1.2)
        best = max(range(len(stretches)), key=lambda i: (scores[i], i))
        return embed(torch.tensor(stretches[best]))

    def mix(logits, hidden):
        """Return the logits (n, V) with the neural cache of `pairs`: a key and the token after it."""
        mixed = []
        for z, h in zip(logits, hidden):
            p = z.softmax(0) * (1 - c.neural_cache_weight)
            scores = torch.stack([30 * torch.cosine_similarity(h, key, 0) for key, _ in pairs]).softmax(0)
            for score, (_, token) in zip(scores, pairs):
                p[token] += c.neural_cache_weight * score
            mixed.append(p.log() + z.logsumexp(0))
        return torch.stack(mixed)

    def reread(prompt, again, sensory, first, second):
        """Read a segment in two passes without a mask. The first pass reserves position 0 for a prompt."""
        close, skip = memory.summary_token, len(sensory)
        x = torch.cat([sensory, first, close])[None]
        takes = "position_ids" in inspect.signature(backbone.forward).parameters
        places = {"position_ids": torch.arange(x.shape[1])[None] + bool(bank)} if takes else {}
        early = backbone(inputs_embeds=x, output_hidden_states=True, use_cache=False, **places)
        whole = torch.cat([prompt, again, sensory, first, second, close])[None]
        late = backbone(inputs_embeds=whole, output_hidden_states=True, use_cache=False)
        logits, hidden = (
            torch.cat([x[0, skip : skip + len(first)], y[0, y.shape[1] - 1 - len(second) : -1]])
            for x, y in ((early.logits, late.logits), (early.hidden_states[-1], late.hidden_states[-1]))
        )
        return logits, early.hidden_states[-1][0, -1:], late.hidden_states[-1][0, -1:], hidden

    def read(prompt, again, sensory, first, second):
        """Return logits and last hidden states. The kind of a column decides what attends to it."""
        if c.reread:
            return reread(prompt, again, sensory, first, second)
        close = memory.summary_token
        begin = 1 + (c.recall_tokens or 0) if bank else 0  # the places of the prompt, if there can be one
        split = begin + len(sensory) + len(first)
        columns = (
            [("prompt", 0)] * len(prompt)
            + [("again", 1 + i) for i in range(len(again))]
            + [("token", i) for i in range(begin, split)]
            + [("query", split)]
        )
        columns += [("behind", i) for i in range(split, split + len(second) + 1)]
        mask = torch.full(
            (1, 1, len(columns), len(columns)),
            torch.finfo(memory.summary_token.dtype).min,
            dtype=memory.summary_token.dtype,
        )
        for i, (kind, _) in enumerate(columns):
            for key, (of_key, _) in enumerate(columns[: i + 1]):
                if i == key or (of_key != "query" and (of_key != "prompt" or kind == "behind")):
                    mask[0, 0, i, key] = 0
        positions = torch.tensor([[place for _, place in columns]])
        x = torch.cat([prompt, again, sensory, first, close, second, close])[None]
        out = backbone(
            inputs_embeds=x, attention_mask=mask, position_ids=positions, output_hidden_states=True, use_cache=False
        )
        tokens = [i for i, (kind, _) in enumerate(columns[:-1]) if kind in ("token", "behind")][len(sensory) :]
        query = next(i for i, (kind, _) in enumerate(columns) if kind == "query")
        hidden = out.hidden_states[-1][0]
        return out.logits[0, tokens], hidden[query : query + 1], hidden[-1:], hidden[tokens]

    for start in range(0, len(row), c.segment_length):
        x = embed(row[start : start + c.segment_length])
        sensory = embed(row[max(0, start - c.sensory_tokens) : start])
        prompt = again = x[:0]
        if bank:  # a query depends on x[:j] alone
            early, query, _, states = read(x[:0], x[:0], sensory, x[:j], x[:0])
            prompt = recall(query)
            if c.recall_tokens and len(x) >= j:
                again = read_again(start)
        out, _, made, hidden = read(prompt, again, sensory, x[:j], x[j:])
        if len(again):
            out, hidden = torch.cat([early, out[j:]]), torch.cat([states, hidden[j:]])
        logits.append(mix(out, hidden) if pairs else out)
        bank.append(made)
        if c.neural_cache_weight:
            pairs += zip(hidden[:-1].detach(), row[start + 1 : start + len(x)].tolist())
            pairs = pairs[-c.memory_size * (c.segment_length - 1) :]
    return torch.cat(logits)
