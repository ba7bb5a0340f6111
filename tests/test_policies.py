"""Policies from elsewhere, and adapters to and from elsewhere, against `transformers` and `peft` themselves.

Tiny models with random weights stand for the architectures: nothing is downloaded, and what is compared is exact anyway.
"""
import json
from copy import deepcopy
from random import Random

import peft
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from g2c_rl.baselm.model import CausalLM, load_baselm, load_model
from g2c_rl.checkpoints import load_checkpoint, save_checkpoint
from g2c_rl.huggingface import FolderTokenizer, HFPolicy, HFTokenizer, load_hf
from g2c_rl.logprobs import completion_log_prob
from g2c_rl.lora import adapters, adapters_off, add_lora, load_adapter, merge_adapters, save_adapter, start_here
from g2c_rl.policies import load_policy, save_policy
from g2c_rl.sampling import greedy_completions, sample_groups
from g2c_rl.tasks import Task
from g2c_rl.trainer import GRPOTrainer

hf.logging.set_verbosity_error()
hf.utils.logging.disable_progress_bar()

LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789+=? '
TEMPLATE = '{{ bos_token }}{% for m in messages %}{{ m.content }}?{% endfor %}{% if add_generation_prompt %}={% endif %}'
SHAPE = dict(vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64)
CONFIGS = dict(
    llama=hf.LlamaConfig(**SHAPE), llama_bias=hf.LlamaConfig(**SHAPE, attention_bias=True, tie_word_embeddings=True),
    llama3=hf.LlamaConfig(**SHAPE, rope_parameters=dict(rope_type='llama3', rope_theta=1e4, factor=8., low_freq_factor=1., high_freq_factor=4.,
                                                        original_max_position_embeddings=16)),
    qwen2=hf.Qwen2Config(**SHAPE), qwen3=hf.Qwen3Config(**SHAPE, head_dim=8),
    gemma=hf.GemmaConfig(**SHAPE, head_dim=16),
    gemma2=hf.Gemma2Config(**SHAPE, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    mistral=hf.MistralConfig(**SHAPE, head_dim=8, sliding_window=6),
    phi3=hf.Phi3Config(**SHAPE),
    gpt2=hf.GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64),
)
PROMPTS = ['a+b=', 'what is 1 + 2? 3 or 4? i do not know', [dict(role='user', content='is it')]]
each = pytest.mark.parametrize('name', CONFIGS)


def make_tokenizer(bos=True, eos_behind=False):
    "One token a character, and what real files add around them"
    vocab = {t: i for i,t in enumerate(['<s>', '</s>', '<end>', *LETTERS.replace(' ', 'Ġ')])}
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    around = f'{"<s> " if bos else ""}$A{" </s>" if eos_behind else ""}'
    made.post_processor = processors.TemplateProcessing(around, special_tokens=[('<s>', 0), ('</s>', 1)])
    made.add_special_tokens(['<s>', '</s>', '<end>'])
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, bos_token='<s>', eos_token='</s>', pad_token='</s>', chat_template=TEMPLATE)


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    "A folder for each architecture, with settings for sampling that must not matter"
    root = tmp_path_factory.mktemp('models')
    for i,(name,config) in enumerate(CONFIGS.items()):
        torch.manual_seed(i)
        config = deepcopy(config)
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, [1, 2], 1
        for rate in ('attention_dropout', 'attn_pdrop', 'resid_pdrop', 'embd_pdrop', 'hidden_dropout'):
            if hasattr(config, rate): setattr(config, rate, .3)
        model = hf.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for p in model.parameters(): p.add_(torch.randn_like(p) * (.2 if p.dim() > 1 else .05))   # spread out: near-ties hide mistakes
        model.generation_config.update(do_sample=True, temperature=.3, top_k=3, repetition_penalty=1.5, max_new_tokens=3, eos_token_id=[1, 2])
        model.save_pretrained(root/name)
        make_tokenizer().save_pretrained(root/name)
    return root


@pytest.fixture
def policy(folders, name): return load_hf(folders/name)


def disturb(model, seed=0, std=.1):
    "Adapters that do something"
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for m in adapters(model).values(): m.lora_B.add_(torch.randn(m.lora_B.shape, generator=generator) * std)
    return model


def scores(model, ids):
    with torch.no_grad(): return model(ids).float()

# ---------------------------------------------------------------- models of transformers

@each
def test_sampler_and_scorer_agree(policy, name):
    model, tokenizer = policy
    for g in sample_groups(model, tokenizer, PROMPTS, 4, 10, torch.Generator().manual_seed(0)):
        with torch.no_grad(): scored = completion_log_prob(model, g.ids, g.prompt_len, g.mask, per_token=True)
        assert torch.allclose(scored, g.token_logp, atol=2e-5)
        plain = model.wrapped(input_ids=g.ids).logits.log_softmax(-1)[:, g.prompt_len-1:-1].gather(-1, g.ids[:, g.prompt_len:, None])[..., 0]
        assert torch.allclose((plain * g.mask), g.token_logp, atol=2e-5), 'the model itself, without cache, padding or slices, says otherwise'


@each
def test_a_batch_is_its_rows(policy, name):
    model, tokenizer = policy
    batch = greedy_completions(model, tokenizer, PROMPTS, 10)
    for prompt,together in zip(PROMPTS, batch):
        alone = greedy_completions(model, tokenizer, [prompt], 10)[0]
        assert together.ids.tolist() == alone.ids.tolist()
        assert torch.allclose(together.token_logp, alone.token_logp, atol=2e-5)


@each
def test_greedy_is_their_greedy(policy, name):
    model, tokenizer = policy
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        plain = hf.GenerationConfig(do_sample=False, max_new_tokens=10, eos_token_id=[1, 2], pad_token_id=1)
        model.wrapped.generation_config = plain
        theirs = model.wrapped.generate(ids, generation_config=plain, attention_mask=torch.ones_like(ids))
        assert greedy_completions(model, tokenizer, [prompt], 10)[0].ids.tolist() == theirs.tolist()


@each
def test_padding_and_caches_change_nothing(policy, name):
    model, _ = policy
    ids = torch.randint(3, 43, (2, 14), generator=torch.Generator().manual_seed(1))
    want = scores(model, ids)
    pad = torch.tensor([5, 0])
    rows = torch.stack([torch.cat([torch.full((5,), 1), ids[0, :9]]), ids[1]])        # padding is EOS
    for split in ([14], [6, 8], [9, 1, 4], [1]*14):
        cache = model.new_cache()
        with torch.no_grad():
            assert torch.allclose(torch.cat([model(part, cache=cache) for part in ids.split(split, 1)], 1), want, atol=2e-5), split
            assert cache.length == 14
            cache = model.new_cache()
            padded = torch.cat([model(part, cache=cache, pad=pad) for part in rows.split(split, 1)], 1)
        assert torch.allclose(padded[0, 5:], want[0, :9], atol=2e-5) and torch.allclose(padded[1], want[1], atol=2e-5), split
    with torch.no_grad(): assert torch.allclose(model(ids, last=3), want[:, -3:], atol=1e-5)
    assert model.context_length == 64


@each
def test_caches_are_new_and_gradients_cross_them(policy, name):
    model, _ = policy
    ids = torch.randint(3, 43, (3, 12), generator=torch.Generator().manual_seed(2))
    ids[:, :7] = ids[:1, :7]
    def gradient(share):
        model.zero_grad()
        if share:
            cache = model.new_cache()
            model(ids[:1, :7], cache=cache)
            many = cache.repeat(3)
            logits = model(ids[:, 7:], cache=many)
            assert (cache.length, many.length) == (7, 12)
            with torch.no_grad(): kept = model(ids[1:, 7:], cache=cache.repeat(3).select(torch.tensor([1, 2])))
            assert torch.allclose(kept, logits[1:], atol=2e-5)
        else: logits = model(ids)[:, 7:]
        logits.log_softmax(-1)[..., 5].sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    one, three = gradient(True), gradient(False)
    assert (one - three).abs().max() < 1e-4 * three.abs().max()


@each
def test_a_step_changes_adapters_only(policy, name):
    model, tokenizer = policy
    add_lora(model.requires_grad_(False))
    before = {n: p.detach().clone() for n,p in model.named_parameters()}
    with torch.no_grad(), adapters_off(model): base = model(torch.tensor([[5, 6, 7]]))
    trainer = GRPOTrainer(model, tokenizer, lambda rng: Task(rng.choice(PROMPTS), 0), lambda t, c: float(len(c) % 2), k=6, groups_per_step=2, seed=1)
    metrics = trainer.train_step()
    assert metrics['updated'] and metrics['kl'] == pytest.approx(0, abs=1e-5), 'the first policy is the reference'
    changed = {n for n,p in model.named_parameters() if not p.equal(before[n])}
    assert changed == {n for n in before if 'lora_B' in n}
    with torch.no_grad(), adapters_off(model): assert model(torch.tensor([[5, 6, 7]])).equal(base)
    trainer.train_step()
    assert any('lora_A' in n for n,p in model.named_parameters() if not p.equal(before[n]))


def test_gpt2_refuses_more_than_it_has(folders):
    model, tokenizer = load_hf(folders/'gpt2')
    with pytest.raises(ValueError, match='do not fit the context of 64'): greedy_completions(model, tokenizer, ['a'*60], 10)

# ---------------------------------------------------------------- tokenizers

@pytest.mark.parametrize('bos', [False, True])
@pytest.mark.parametrize('eos_behind', [False, True])
def test_prompts_begin_once_and_do_not_end(tmp_path, bos, eos_behind):
    theirs = make_tokenizer(bos, eos_behind)
    theirs.save_pretrained(tmp_path)
    (tmp_path/'generation_config.json').write_text(json.dumps(dict(eos_token_id=[1, 2])))
    for ours in (HFTokenizer(theirs, [1, 2]), FolderTokenizer(tmp_path)):
        letters = [theirs.convert_tokens_to_ids(c) for c in 'ab']
        assert ours.encode('ab') == [0]*bos + letters
        for written in ('<s>ab', *['<s><s>ab']*bos): assert ours.encode(written) == [0] + letters      # who writes it, has it, once
        assert ours.encode([dict(role='user', content='ab')]) == [0, *letters, *ours.encode('?=')[bos:]]   # the template wants one
        assert ours.encode([dict(role='user', content='a'), dict(role='assistant', content='b')])[-1] == letters[1]
        assert (ours.stop_ids, ours.eos_id, ours.pad_id, len(ours)) == ([1, 2], 1, 1, len(theirs))
        assert ours.decode([*letters, 1]) == 'ab' and ours.decode([]) == ''
        assert isinstance(ours.encode('\ud800 日本'), list)


def test_a_folder_reads_as_transformers_reads_it(folders):
    ours, theirs = FolderTokenizer(folders/'llama'), hf.AutoTokenizer.from_pretrained(folders/'llama')
    rng = Random(0)
    for _ in range(50):
        text = ''.join(rng.choice(LETTERS + '  ') for _ in range(20))
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == text

# ---------------------------------------------------------------- our own Llama

@pytest.mark.parametrize('name', ['llama', 'llama_bias'])
def test_our_llama_is_theirs(folders, name):
    theirs, _ = load_hf(folders/name)
    model, tokenizer = load_policy(folders/name)
    assert isinstance(model, CausalLM) and isinstance(tokenizer, FolderTokenizer)
    ids = torch.randint(48, (3, 20), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(scores(model, ids), scores(theirs, ids), atol=2e-5)


def test_shards(folders, tmp_path):
    theirs, _ = load_hf(folders/'llama')
    theirs.wrapped.save_pretrained(tmp_path, max_shard_size='20KB')
    assert len(list(tmp_path.glob('model-*.safetensors'))) > 1
    ids = torch.arange(3, 23)[None]
    assert torch.allclose(scores(load_model(tmp_path), ids), scores(theirs, ids), atol=2e-5)


@pytest.mark.parametrize('name', ['llama3', 'qwen2', 'gpt2', 'mistral'])
def test_what_our_llama_is_not_goes_through_transformers(folders, name):
    model, tokenizer = load_policy(folders/name)
    assert isinstance(model, HFPolicy) and isinstance(tokenizer, HFTokenizer)
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


def test_baselm_is_what_it_was():
    model, tokenizer = load_baselm()
    ids = torch.tensor([tokenizer.encode('What is 23 + 58? Options: 81 or 71. Answer with the number: 81')])
    last = scores(model, ids)[0, -1]
    top = last.topk(4)
    assert top.indices.tolist() == GOLDEN['ids'] and torch.allclose(top.values, torch.tensor(GOLDEN['logits']), atol=1e-4)


GOLDEN = dict(ids=[1, 49, 263, 288], logits=[11.9266, 11.0639, 10.3787, 3.7673])

# ---------------------------------------------------------------- adapters in and out

def base_of(name, folders):
    "A fresh base for us, and one for peft"
    if name == 'baselm': return load_baselm()[0].requires_grad_(False)
    return load_policy(folders/name)[0]


def their_base(name, folders, tmp_path):
    if name != 'baselm': return hf.AutoModelForCausalLM.from_pretrained(folders/name).eval()
    save_policy(*load_baselm(), tmp_path/'baselm')
    return hf.AutoModelForCausalLM.from_pretrained(tmp_path/'baselm').eval()


both = pytest.mark.parametrize('name', ['baselm', *CONFIGS])
IDS = torch.randint(3, 43, (2, 12), generator=torch.Generator().manual_seed(5))


@both
def test_peft_loads_what_we_save(name, folders, tmp_path):
    ours = disturb(add_lora(base_of(name, folders), rank=4, alpha=6))
    save_adapter(ours, tmp_path/'adapter', name)
    theirs = peft.PeftModel.from_pretrained(their_base(name, folders, tmp_path), tmp_path/'adapter').eval()
    with torch.no_grad(): got = theirs(input_ids=IDS).logits
    assert torch.allclose(got, scores(ours, IDS), atol=1e-5)
    with torch.no_grad(), adapters_off(ours): assert (got - ours(IDS)).abs().max() > 1e-2, 'the adapter does nothing'


@both
def test_we_load_what_peft_saves(name, folders, tmp_path):
    torch.manual_seed(0)
    fused = {'gpt2': ['c_attn'], 'phi3': ['qkv_proj']}.get(name, ['q_proj', 'k_proj', 'v_proj'])
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=fused, init_lora_weights=False, use_rslora=name == 'llama',
                             fan_in_fan_out=name == 'gpt2', task_type='CAUSAL_LM')
    theirs = peft.get_peft_model(their_base(name, folders, tmp_path), config).eval()
    theirs.save_pretrained(tmp_path/'adapter')
    ours = load_adapter(base_of(name, folders), tmp_path/'adapter')
    with torch.no_grad(): assert torch.allclose(theirs(input_ids=IDS).logits, scores(ours, IDS), atol=1e-5)
    save_adapter(ours, tmp_path/'again')
    again = peft.PeftModel.from_pretrained(their_base(name, folders, tmp_path/'2'), tmp_path/'again').eval()
    with torch.no_grad(): assert torch.allclose(again(input_ids=IDS).logits, scores(ours, IDS), atol=1e-5)


@both
def test_merged_is_unmerged_and_loads_anywhere(name, folders, tmp_path):
    model, tokenizer = load_baselm() if name == 'baselm' else load_policy(folders/name)
    disturb(add_lora(model, rank=4))
    want = scores(model, IDS)
    merge_adapters(model)
    assert torch.allclose(scores(model, IDS), want, atol=1e-4) and not adapters(model)
    save_policy(model, tokenizer, tmp_path/'merged')
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path/'merged').eval()
    with torch.no_grad(): assert torch.allclose(theirs(input_ids=IDS).logits, want, atol=1e-4)
    their_tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path/'merged')
    ours, our_tokenizer = load_policy(tmp_path/'merged')
    assert torch.allclose(scores(ours, IDS), want, atol=1e-4)
    for text in ('what is 1 + 2?', 'a  b=7'):
        assert their_tokenizer(text).input_ids == tokenizer.encode(text) == our_tokenizer.encode(text)
    assert (our_tokenizer.stop_ids, our_tokenizer.pad_id) == (getattr(tokenizer, 'stop_ids', [tokenizer.eos_id]), tokenizer.pad_id)
    if name != 'baselm': assert our_tokenizer.encode(PROMPTS[2]) == tokenizer.encode(PROMPTS[2])


def test_baselm_speaks_the_same_everywhere(tmp_path):
    model, tokenizer = load_baselm()
    save_policy(model, tokenizer, tmp_path)
    ours, theirs = FolderTokenizer(tmp_path), hf.AutoTokenizer.from_pretrained(tmp_path)
    rng = Random(1)
    for _ in range(300):
        text = ''.join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(9, 14), rng.randrange(128, 0x3000), 0x1F600])) for _ in range(30))
        assert ours.encode(text) == tokenizer.encode(text) == theirs(text).input_ids, text
        assert ours.decode(ours.encode(text)) == text

# ---------------------------------------------------------------- going on from an adapter

def make_trainer(model, tokenizer, seed=3, **other):
    task = lambda rng: Task(f'What is {rng.randint(10, 40)} + {rng.randint(10, 40)}? Answer with the number:', 1)
    return GRPOTrainer(model, tokenizer, task, lambda t, c: float('3' in c), k=4, groups_per_step=2, lr=5e-3, seed=seed, **other)


def test_the_adapter_that_we_start_from_is_the_reference(tmp_path):
    first = disturb(add_lora(load_baselm()[0], rank=4), std=.05)
    save_adapter(first, tmp_path/'first', 'baselm')
    model, tokenizer = load_policy('baselm', adapter=tmp_path/'first')
    trainer = make_trainer(model, tokenizer)
    ids = torch.tensor([tokenizer.encode('What is 12 + 13? Answer with the number: 25')])
    start, bare = scores(first, ids), scores(load_baselm()[0], ids)
    assert (start - bare).abs().max() > .1
    assert scores(model, ids).equal(start)
    history = trainer.train(8)
    assert history['updated'][0] and history['kl'][0] == pytest.approx(0, abs=1e-6), 'at step 0 the policy is the reference'
    assert max(history['kl'][1:]) > 1e-4, 'a reference that moves along measures nothing'
    assert (scores(model, ids) - start).abs().max() > 1e-3
    with trainer.frozen() as reference: assert reference(ids).equal(start), 'the reference moved'
    save_adapter(model, tmp_path/'second', 'baselm')                       # a correction of the bare base: loads without the first
    assert scores(load_policy('baselm', adapter=tmp_path/'second')[0], ids).equal(scores(model, ids))
    theirs = peft.PeftModel.from_pretrained(their_base('baselm', None, tmp_path), tmp_path/'second').eval()
    with torch.no_grad(): assert torch.allclose(theirs(input_ids=ids).logits, scores(model, ids), atol=1e-4)
    assert torch.allclose(scores(merge_adapters(deepcopy(model)), ids), scores(model, ids), atol=1e-4)


def test_a_run_from_an_adapter_resumes_bit_for_bit(tmp_path):
    save_adapter(disturb(add_lora(load_baselm()[0], rank=4), std=.05), tmp_path/'first')
    whole = make_trainer(*load_policy('baselm', adapter=tmp_path/'first'))
    whole.train(4)
    half = make_trainer(*load_policy('baselm', adapter=tmp_path/'first'))
    half.train(2)
    save_checkpoint(half, tmp_path/'half.safetensors')
    resumed = make_trainer(*load_policy('baselm', adapter=tmp_path/'first'))
    load_checkpoint(resumed, tmp_path/'half.safetensors')
    resumed.train(2)
    compare = ('reward_mean', 'kl', 'loss', 'grad_norm')
    assert {k: resumed.history[k] for k in compare} == {k: whole.history[k] for k in compare}
    for (n,p),(_,q) in zip(resumed.model.named_parameters(), whole.model.named_parameters()): assert p.equal(q), n


def test_start_here_needs_adapters():
    with pytest.raises(ValueError, match='no adapters to start from'): start_here(load_baselm()[0])
