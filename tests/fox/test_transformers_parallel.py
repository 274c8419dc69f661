"""transformers' own tests of tensor parallelism and of FSDP2, run on FoX (Pro) in two processes."""

import inspect
import unittest
from unittest import mock

import pytest
import torch.distributed as dist
import transformers
from processes import WORLD
from test_transformers_common import FoxModelTester
from transformers_sdist import load

from hf_longctx.fox import FoxConfig, FoxForCausalLM, FoxModel


if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
    pytest.skip("plans are those of transformers 5.23", allow_module_level=True)
pytestmark = pytest.mark.upstream

tensor_parallel, sharded = load("test_tensor_parallel_mixin"), load("test_fsdp_mixin")


def upstream(module, name, *arguments):
    """Call a function of one of the mixins, in each process."""
    transformers.set_seed(42)
    mixin = load(module)
    mixin.NUM_STEPS = 4  # steps of each compared training run (default: 20)
    getattr(mixin, name)(dist.get_rank(), *arguments)


class ParallelTests(tensor_parallel.TensorParallelTesterMixin, sharded.FSDPTesterMixin):
    all_model_classes = (FoxModel, FoxForCausalLM)
    model_tester = None  # abstract in the mixins

    @pytest.fixture(autouse=True)
    def processes(self, two_processes):
        self.two_processes = two_processes

    def setUp(self):
        self.model_tester = FoxModelTester(self.make_config, rope=False)
        # The lists of the models that are worth it to transformers.
        for module, models in (
            (tensor_parallel, "TP_DISTRIBUTED_TEST_MODEL_TYPES"),
            (sharded, "FSDP_DISTRIBUTED_TEST_MODEL_TYPES"),
        ):
            self.replace(module, models, None)
        self.replace(tensor_parallel, "run_distributed", self.run_distributed)

    def replace(self, module, name, value):
        patch = mock.patch.object(module, name, value)
        patch.start()
        self.addCleanup(patch.stop)

    def run_distributed(self, world_size):
        assert world_size == WORLD
        return lambda test: (
            lambda *arguments: self.two_processes(
                upstream, inspect.getmodulename(test.__code__.co_filename), test.__name__, *arguments, attempts=2
            )
        )

    def _run_fsdp2_distributed_test(self, test_name, test, *arguments, world_size=None, **options):
        if (world_size or WORLD) != WORLD:
            self.skipTest(f"needs {world_size} processes, we have {WORLD}")
        assert not options
        self.run_distributed(WORLD)(test)(*self._get_tiny_config(), *arguments)


class TestFoxPro(ParallelTests, unittest.TestCase):
    make_config = FoxConfig.pro
