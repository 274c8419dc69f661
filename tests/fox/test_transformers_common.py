"""transformers' own common tests, run on FoX (LLaMA) and FoX (Pro).

The source distribution contains the tests of models, configurations and training. Only a clone contains the tests of
generation and export (transformers_sdist.py). The tests of pipelines need transformers' Hub. The tests of models that
are split over processes are in test_transformers_parallel.py.
"""

import unittest
from unittest import mock

import pytest
import torch
from transformers.models.auto import modeling_auto
from transformers_sdist import load

from hf_longctx.fox import (
    FoxConfig,
    FoxForCausalLM,
    FoxForQuestionAnswering,
    FoxForSequenceClassification,
    FoxForTokenClassification,
    FoxModel,
)
from hf_longctx.fox.attention_fox import folded_width


pytestmark = pytest.mark.upstream
common = load("test_modeling_common")
ConfigTester = load("test_configuration_common").ConfigTester
TrainingTesterMixin = load("test_training_mixin").TrainingTesterMixin

# transformers' tests find out by the class name in these tables which labels a model takes.
NAMES = {
    "MODEL_MAPPING_NAMES": "FoxModel",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "FoxForCausalLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "FoxForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "FoxForTokenClassification",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "FoxForQuestionAnswering",
}


class FoxModelTester:
    """Small configurations and inputs, in the form that the mixins ask for."""

    base_model_class = FoxModel
    causal_lm_class = FoxForCausalLM
    is_training = True
    batch_size, seq_length = 3, 7
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 99, 32, 2, 4

    def __init__(self, make_config, rope):
        self.make_config = make_config
        self.rope = rope

    def get_config(self):
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
        return self.make_config(
            rope_parameters=rope if self.rope else None,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=37,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            max_position_embeddings=512,
            pad_token_id=0,
        )

    def prepare_config_and_inputs_for_common(self):
        input_ids = common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        mask = torch.ones_like(input_ids).tril(self.seq_length - self.batch_size)  # right padding
        return self.get_config(), {"input_ids": input_ids, "attention_mask": mask}


@pytest.mark.filterwarnings(
    "ignore:It is deprecated to return a value:DeprecationWarning"
)  # from transformers' retries
@pytest.mark.filterwarnings("always:.past_key_values. is deprecated:FutureWarning")  # one of them expects it
@pytest.mark.filterwarnings("ignore:.device. is deprecated:FutureWarning")  # transformers' tests of 5.15 pass it
class FoxTests(common.ModelTesterMixin, common.GenerationTesterMixin, TrainingTesterMixin):
    all_model_classes = (
        FoxModel,
        FoxForCausalLM,
        FoxForSequenceClassification,
        FoxForTokenClassification,
        FoxForQuestionAnswering,
    )
    training_overfit_steps, training_overfit_learning_rate = 60, 5e-3
    test_can_init_all_missing_weights_before_2023 = True  # it looks for a year at the top of the file

    def setUp(self):
        self.model_tester = FoxModelTester(self.make_config, rope="rope" in self._testMethodName)
        if "eager_matches" in self._testMethodName or "torch_dtype" in self._testMethodName:
            self.all_model_classes = (FoxForCausalLM,)  # the other classes have the same attention and dtypes
        self.config_tester = ConfigTester(self, config_class=FoxConfig, hidden_size=32)
        for table, name in NAMES.items():
            patch = mock.patch.dict(getattr(modeling_auto, table), fox=name)
            patch.start()
            self.addCleanup(patch.stop)
        torch.set_printoptions(threshold=0, edgeitems=1)  # test_bc_torch_dtype writes every parameter into a message
        self.addCleanup(torch.set_printoptions, profile="default")

    def _get_attention_shape(self, batch_size, seq_length, config):
        """Shape of cached keys and values: in addition to its head_dim columns, a key carries its decay."""
        groups = config.num_attention_heads // config.num_key_value_heads
        width = folded_width(config.head_dim, groups, torch.device(common.torch_device))
        return 2 * ((batch_size, config.num_key_value_heads, seq_length, width),)

    def _get_conv_state_shape(self, batch_size, config):
        return (batch_size, 2 * config.num_key_value_heads * config.head_dim, 1)

    def test_config(self):
        self.config_tester.run_common_tests()


class TestFoxLlama(FoxTests, unittest.TestCase):
    make_config = FoxConfig
    all_model_classes = (FoxForCausalLM,)  # TestFoxPro tests the other heads, which do not depend on the block


class TestFoxPro(FoxTests, unittest.TestCase):
    make_config = FoxConfig.pro
