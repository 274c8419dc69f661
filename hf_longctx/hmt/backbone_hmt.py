"""What HMT asks of a backbone: embed tokens, run embeddings, hand out the last hidden state.

Any transformers causal LM that takes `inputs_embeds` will do. The last hidden state (after the final norm, and after
OPT's output projection) is what a base model returns as `last_hidden_state`; when logits are wanted too, the whole
causal LM is run, so that soft caps and scales of its head apply, and a hook on the base model keeps the hidden state.
Neither a list of all hidden states nor an unwanted key/value cache is ever built.
"""

import inspect

import torch


_LAST_HIDDEN = "hmt_last_hidden_state"
_IGNORE_ATTENTION_MASK = ("rwkv",)  # accept an attention mask and do not use it


class Backbone:
    """Calls into a causal LM. Holds no parameters: the module stays registered in the wrapper alone.

    Args:
        model: a causal LM, or a PEFT model around one.

    Raises:
        ValueError: no input embeddings, no `inputs_embeds`, or prompt-learning PEFT; the message names the class.
    """

    def __init__(self, model):
        if getattr(model, "active_peft_config", None) is not None:
            if model.active_peft_config.is_prompt_learning:
                raise ValueError(
                    f"{type(model).__name__} uses {model.active_peft_config.peft_type}, which adds its own positions "
                    "to the input; HMT builds the input itself. Use LoRA or another method that changes weights."
                )
            model = model.get_base_model()
        name = type(model).__name__
        self.forward_arguments = frozenset(inspect.signature(model.forward).parameters)
        if "inputs_embeds" not in self.forward_arguments:
            raise ValueError(f"{name}.forward takes no inputs_embeds; HMT puts memory embeddings among the tokens'.")
        try:
            embedding = model.get_input_embeddings()
        except NotImplementedError:
            embedding = None
        if embedding is None:
            raise ValueError(f"{name} has no input embeddings; HMT needs them to embed tokens beside its memory.")
        self.model = model
        self.base = model.get_decoder()  # not base_model: OPTForCausalLM calls the decoder inside its base model
        if self.base is model:
            raise ValueError(f"{name} has no head beside its base model; pass a causal LM such as LlamaForCausalLM.")
        if _keep_last_hidden not in self.base._forward_hooks.values():
            self.base.register_forward_hook(_keep_last_hidden)
        self.width = embedding.weight.shape[-1]
        self.sees_padding = model.config.model_type not in _IGNORE_ATTENTION_MASK
        # A stateful backbone cannot be continued by several tokens at once in general: its segment is read again.
        self.continues = "past_key_values" in self.forward_arguments and not getattr(model, "_is_stateful", False)

    def embed(self, ids):
        """Token embeddings as the backbone's first layer receives them, (B, T) -> (B, T, d)."""
        return self.model.get_input_embeddings()(ids)

    def run(self, embeds, mask, keep, kv_cache=None, skip_padding=False):
        """One pass.

        Args:
            embeds: (B, T, d).
            mask: (B, cached + T), bool, False is padding; or None when nothing is.
            keep: positions among the T whose logits are wanted, (n,) long; or None for no logits.
            kv_cache: a `Cache` to continue from and to extend, or None.
            skip_padding: let position ids count unmasked positions only, where the backbone takes position ids.

        Returns:
            logits (B, n, V) or None, last hidden state (B, T, d).
        """
        inputs = {"inputs_embeds": embeds, "use_cache": kv_cache is not None}
        if mask is not None:
            inputs["attention_mask"] = mask.long()
            if skip_padding and "position_ids" in self.forward_arguments:
                positions = (mask.long().cumsum(1) - 1).clamp(min=0)
                inputs["position_ids"] = positions[:, -embeds.shape[1] :]
        if kv_cache is not None:
            inputs["past_key_values"] = kv_cache
        if keep is None:
            self.base(**inputs)
            return None, self._last_hidden()
        if "logits_to_keep" in self.forward_arguments:
            logits = self.model(**inputs, logits_to_keep=keep).logits
        else:
            logits = self.model(**inputs).logits[:, keep]
        return logits, self._last_hidden()

    def _last_hidden(self):
        hidden = self.base.__dict__.pop(_LAST_HIDDEN)
        if hidden.shape[-1] != self.width:
            raise ValueError(
                f"{type(self.model).__name__} takes embeddings of width {self.width} and ends in hidden states of "
                f"width {hidden.shape[-1]}; HMT feeds the latter back as the former, so they must be equal."
            )
        return hidden

    @torch.no_grad()
    def embedding_std(self):
        """Standard deviation of what `embed` returns (a scaled embedding such as Gemma's included), over at most 4096
        tokens spread over the vocabulary."""
        vocabulary, device = self.model.get_input_embeddings().weight.shape[0], self.model.device
        ids = torch.linspace(0, vocabulary - 1, min(vocabulary, 4096), device=device).long()
        return self.embed(ids[None]).float().std().item()


def _keep_last_hidden(module, args, output):
    module.__dict__[_LAST_HIDDEN] = output[0]


__all__ = ["Backbone"]
