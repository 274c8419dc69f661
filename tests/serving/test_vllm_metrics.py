"""The metrics on a FoX in vLLM: counts equal those of the model, offline and through a server."""

import json
from pathlib import Path

import pytest
import torch
from served_fox import FLOAT32, engine

from hf_longctx.metrics import OfflineModel, forgetting_curve, position_loss


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "model_cards" / "fox-demo"


def test_an_offline_engine_gives_the_counts_of_the_model():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    options = dict(lengths=[8, 64, 200], repeats=3, data_type="random")
    text = torch.randint(3, 1000, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    with engine(DEMO, max_model_len=512) as llm:
        curve = forgetting_curve(OfflineModel(llm), None, **options)
        loss = position_loss(OfflineModel(llm), text, context_length=256)
    assert curve.points == forgetting_curve(model, None, **options).points
    assert curve.points[-1].copy_mean > 0.5
    torch.testing.assert_close(
        torch.tensor(loss.loss),
        torch.tensor(position_loss(model, text, context_length=256).loss),
        atol=FLOAT32,
        rtol=0,
    )


def test_a_server_gives_the_replies_and_counts_of_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    from scripts import serve_vllm

    output, small = tmp_path / "x.json", "--prompts 3 --tokens 8 --lengths 8 64 --repeats 2 --max-model-len 512"
    with pytest.raises(SystemExit) as ended:
        serve_vllm.main([*small.split(), "--output", str(output)])
    assert ended.value.code == 0
    assert [row["of"] for row in json.loads(output.read_text())["rows"]] == [3, 2, 2, 2]
