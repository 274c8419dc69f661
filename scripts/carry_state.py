"""Train on documents in consecutive chunks: a Trainer hands the state of a memory from one chunk to the next.

The rows of a batch are streams, which are read side by side: row s of step t + 1 goes on where row s of step t
stopped. The state goes along without its graph: gradients end at the chunk, and what a model remembers does not.

    class MyTrainer(CarriesStates, Trainer): ...

    chunks = DocumentStreams(tokens, 2048, tokenizer.eos_token_id, streams=8)
    arguments = TrainingArguments(..., per_device_train_batch_size=8, remove_unused_columns=False)
    MyTrainer(HMTWrapper.from_backbone(...), arguments, train_dataset=chunks)
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import Trainer

from hf_longctx.hmt import HMTState


class DocumentStreams(torch.utils.data.Dataset):
    """Chunks of documents in the order in which streams are read side by side.

    Each document is cut into chunks of its own, the last of which is padded. The chunks of the whole text, in their
    order, are divided into as many streams of equal length; up to `streams` - 1 chunks at the end are not used. Item
    t * streams + s is chunk t of stream s.

    Args:
        tokens: (N,), integers, each document with `eos_token_id` at its end.
        length: tokens of a chunk, T.
        eos_token_id: ends a document. None: the tokens are one document.
        streams: their number, a multiple of the rows of a forward pass over all processes; with the rows of an
            optimizer step the memory goes from step to step, with fewer also through the passes of a step.

    An item is {"input_ids", "attention_mask", "labels"}, each (T,), int64, and two scalars: "stream", the number s,
    and "begins", True where no state is carried to: at the first chunk of a document or of a stream.

    Raises:
        ValueError: there are fewer chunks than streams.
    """

    def __init__(self, tokens: np.ndarray, length: int, eos_token_id: int | None, streams: int):
        self.tokens, self.length, self.streams = tokens, length, streams
        ends = np.zeros(0, np.int64) if eos_token_id is None else np.flatnonzero(tokens == eos_token_id) + 1
        ends = np.union1d(ends, [len(tokens)])
        starts = np.concatenate([[0], ends[:-1]])
        chunks = -(-(ends - starts) // length)  # of each document
        number = np.arange(chunks.sum()) - np.repeat(chunks.cumsum() - chunks, chunks)  # of a chunk in its document
        self.starts = np.repeat(starts, chunks) + number * length
        self.stops = np.minimum(self.starts + length, np.repeat(ends, chunks))
        self.begins = number == 0
        if len(self.starts) < streams:
            raise ValueError(
                f"the text has {len(self.starts)} chunks of at most {length} tokens; {streams} streams, one for each "
                "row of a batch, need at least as many. Give more text, or fewer streams or shorter chunks."
            )

    def __len__(self):
        return len(self.starts) // self.streams * self.streams

    def text_share(self) -> float:
        """Return the share of the chunks that is text and not padding."""
        return float((self.stops - self.starts).mean() / self.length)

    def __getitem__(self, item):
        t, stream = divmod(item, self.streams)
        chunk = stream * (len(self) // self.streams) + t
        ids = torch.from_numpy(self.tokens[self.starts[chunk] : self.stops[chunk]].astype(np.int64))
        padding = (0, self.length - len(ids))
        return {
            "input_ids": torch.nn.functional.pad(ids, padding),
            "attention_mask": torch.nn.functional.pad(torch.ones_like(ids), padding),
            "labels": torch.nn.functional.pad(ids, padding, value=-100),
            "stream": torch.tensor(stream),
            "begins": torch.tensor(t == 0 or bool(self.begins[chunk])),
        }


TrainerMethods = Trainer if TYPE_CHECKING else object  # of a mixin


class CarriesStates(TrainerMethods):
    """Mixin for a `Trainer` of a model with memory: each forward pass goes on from the state of its streams.

    The batches are those of `DocumentStreams`, in order. Evaluation begins without states and leaves those of the
    training alone. A checkpoint holds the states, one file for the streams of a forward pass, so that a resumed run
    equals an uninterrupted one; it may have another number of processes, and the same number of rows in a pass.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.args.train_sampling_strategy = "sequential"
        self.states: dict[int, HMTState | Path] = {}  # by the first stream of a pass; or a file of a checkpoint

    def train(self, *args, **kwargs):
        self.states = {}
        return super().train(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        states, self.states = self.states, {}
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.states = states

    def compute_loss(self, model, inputs: dict[str, Any], return_outputs: bool = False, **kwargs):
        inputs = dict(inputs)
        if not {"stream", "begins"} <= inputs.keys():
            raise ValueError(
                f"the batch has {', '.join(inputs)}, without a stream to carry a state in. Make the dataset by "
                "DocumentStreams, and set remove_unused_columns=False in TrainingArguments."
            )
        streams, begins = inputs.pop("stream").tolist(), inputs.pop("begins").tolist()
        inputs |= {"state": self.state_before(streams, begins), "use_cache": True}
        result: Any = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss, outputs = result
        self.states[streams[0]] = outputs["state"].detach()
        return (loss, outputs) if return_outputs else loss

    def state_before(self, streams: list[int], begins: list[bool]) -> HMTState | None:
        """Return the state from which the next chunks of `streams` are read; None if all of them begin."""
        state = self.states.get(streams[0])
        if all(begins):
            return None
        if isinstance(state, Path):
            state = HMTState.load(state, None).to(self.args.device)  # of the weights some steps ago
        if state is None or len(state.lengths) != len(streams):
            rows = "no rows" if state is None else f"{len(state.lengths)} rows"
            raise ValueError(
                f"{len(streams)} rows from stream {streams[0]} on go on within a document, and the state there is of "
                f"{rows}. Read the chunks in order, and resume with the `per_device_train_batch_size` that the run began with."
            )
        return state.restart_rows(begins)

    def _save_rng_state(self, output_dir):  # as the random state, states differ between processes
        super()._save_rng_state(output_dir)
        folder = Path(output_dir) / "states"
        folder.mkdir(exist_ok=True)
        for stream, state in self.states.items():
            if isinstance(state, HMTState):
                state.save(folder / f"{stream}.safetensors", None)

    def _load_rng_state(self, checkpoint):
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self.states = {int(file.stem): file for file in Path(checkpoint, "states").glob("*.safetensors")}


__all__ = ["CarriesStates", "DocumentStreams"]
