"""Wrong on purpose: a catalogue of mistakes in the four functions, each of which must fail a test of `test_rl.py`.

The four functions are written once more, plainly. A mistake is a small edit of one of them: this text, replaced by that. To see
that the tests ask for the right thing and not for one way of writing it, correct implementations that look different must pass.
"""
import inspect
from dataclasses import dataclass
from statistics import mean, stdev
from types import SimpleNamespace

import pytest
import test_rl
import torch
import torch.nn.functional as F
from test_rl import SOLUTIONS

from g2c_rl.lora import adapters_off  # noqa: F401 (some mistakes use it)
from g2c_rl.loss import kl_estimate
from g2c_rl.sampling import eval_mode, sample_groups  # noqa: F401
from g2c_rl.tasks import score
from g2c_rl.trainer import GRPOTrainer

# ---------- the four functions, plainly

def group_advantages(rewards):
    if not rewards.isfinite().all(): raise ValueError('rewards must be finite')
    if rewards.shape[-1] == 1: return torch.zeros_like(rewards)
    mean, std = rewards.mean(-1, keepdim=True), rewards.std(-1, keepdim=True)
    dead = rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)
    return torch.where(dead, 0., (rewards - mean) / std)


def completion_log_prob(model, ids, prompt_len, mask=None):
    logits = model(ids)[:, prompt_len-1:-1].float()
    targets = ids[:, prompt_len:]
    logp = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    if mask is not None: logp = logp * mask
    return logp.sum(-1)


def grpo_loss(logp, ref_logp, advantages, kl_coef):
    d = ref_logp.detach() - logp
    near = d.clamp(max=20)
    kl = near.exp() - near - 1 + (near.detach().exp() - 1) * (d - near)
    return -(advantages.detach() * logp).mean() + kl_coef * kl.mean()


def train_step(self):
    with eval_mode(self.model):
        tasks = [self.make_task(self.rng) for _ in range(self.groups_per_step)]
        groups = sample_groups(self.model, self.tokenizer, [task.prompt for task in tasks], self.k, self.max_new_tokens, self.generator)
        rewards = torch.tensor([[score(self.verifier, task, c) for c in g.completions] for task,g in zip(tasks, groups)])
        advantages = group_advantages(rewards)
        self.batch = tasks, groups, rewards, advantages
        live = [i for i,r in enumerate(rewards) if r.max() > r.min()]
        if not live: return record(groups, rewards)
        self.optimizer.zero_grad()
        losses, kls = [], []
        for i in live:
            g = groups[i]
            logp = completion_log_prob(self.model, g.ids, g.prompt_len, g.mask)
            with self.frozen() as reference:
                ref_logp = completion_log_prob(reference, g.ids, g.prompt_len, g.mask)
            losses.append(grpo_loss(logp, ref_logp, advantages[i], self.kl_coef))
            kls.append(kl_estimate(logp.detach(), ref_logp).mean())
        loss, kl = torch.stack(losses).mean(), torch.stack(kls).mean()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()
    return record(groups, rewards, loss.item(), kl.item(), grad_norm.item(), updated=1.)


def record(groups, rewards, loss=float('nan'), kl=float('nan'), grad_norm=float('nan'), updated=0.):
    "What a step reports; NaN is what was not measured"
    dead, tokens = rewards.amax(-1) == rewards.amin(-1), sum(g.lengths.sum().item() for g in groups)
    return dict(loss=loss, kl=kl, grad_norm=grad_norm, updated=updated, tokens=tokens, reward_mean=rewards.mean().item(),
                entropy=-sum(g.logp.sum().item() for g in groups) / tokens,
                all_fail=(dead & (rewards[:, 0] < 1)).sum().item(), all_pass=(dead & (rewards[:, 0] >= 1)).sum().item())


# ---------- the catalogue

@dataclass(frozen=True)
class Mistake:
    "A wrong implementation of one of the four functions"
    function:str    # Which one
    what:str        # What is wrong, in a line
    edits:tuple     # Old and new text, in turn
    says:str = ''   # Words by which the failing test names this mistake, for the likeliest ones

    def __str__(self): return f'{self.function}: {self.what}'

    @property
    def wrong(self):
        "The function with the mistake in it"
        source = inspect.getsource(globals()[self.function])
        for old,new in zip(self.edits[::2], self.edits[1::2]):
            assert source.count(old) == 1, f'{self}: {old!r} is there {source.count(old)} times'
            source = source.replace(old, new)
        exec(source, scope := dict(globals()))
        return scope[self.function]


CATALOGUE = []
def mistake(function, what, *edits, says=''): CATALOGUE.append(Mistake(function, what, edits, says))


def advantages_with(*args, **kwargs): mistake('group_advantages', *args, **kwargs)

SCALED, EXACT = '(rewards - mean) / std', 'torch.where(dead, 0., (rewards - mean) / std)'
DEAD = 'rewards.amax(-1, keepdim=True) == rewards.amin(-1, keepdim=True)'
STD, MEAN = 'rewards.std(-1, keepdim=True)', 'rewards.mean(-1, keepdim=True)'
advantages_with('signs flipped', '(rewards - mean)', '(mean - rewards)', says='your signs are flipped')
advantages_with('not centred', '(rewards - mean)', 'rewards', says='subtract the mean of the group before you divide')
advantages_with('not scaled', SCALED, 'rewards - mean', says='you have centred the rewards; now divide')
advantages_with('the rewards themselves', SCALED, 'rewards', says='these are the rewards themselves')
advantages_with('divided by K instead of K-1', STD, 'rewards.std(-1, correction=0, keepdim=True)', says='yours divides the squares by K')
advantages_with('variance instead of standard deviation', STD, 'rewards.var(-1, keepdim=True)', says='not by the variance')
advantages_with('statistics of the whole batch', STD, 'rewards.std()', MEAN, 'rewards.mean()', says='your advantages mix the groups')
advantages_with('spread of the whole batch', STD, 'rewards.std()', says='standard deviation is that of the whole batch')
advantages_with('mean of the whole batch', MEAN, 'rewards.mean()')
advantages_with('statistics over the columns', STD, 'rewards.std(0, keepdim=True)', MEAN, 'rewards.mean(0, keepdim=True)',
                says='your statistics are those of the columns')
advantages_with('a dead group silences the batch', 'return torch.where',
                'if dead.any(): return torch.zeros_like(rewards)\n    return torch.where',
                says='one group without contrast must not silence the others')
advantages_with('dead only if the whole batch is equal', DEAD, 'rewards.max() == rewards.min()', says='0/0 is NaN')
advantages_with('0/0 in a dead group', DEAD, 'torch.zeros_like(rewards).bool()', says='0/0 is NaN')
advantages_with('dead judged by std == 0', DEAD, 'std == 0', says='rounding makes the standard deviation of equal rewards')
advantages_with('0/0 patched over', EXACT, '((rewards - mean) / std).nan_to_num(0., 0., 0.)',
                says='rounding makes the standard deviation of equal rewards')
advantages_with('dead judged by std < 1e-6', DEAD, 'std < 1e-6', says='no tolerance')
advantages_with('dead judged by isclose', DEAD, 'rewards.amax(-1, keepdim=True).isclose(rewards.amin(-1, keepdim=True))',
          says='no tolerance')
advantages_with('dead only if all fail', DEAD, 'rewards.amax(-1, keepdim=True) == 0')
advantages_with('dead only if all pass or all fail', DEAD, 'rewards.mean(-1, keepdim=True) % 1 == 0')
for eps in ('1e-4', '1e-6', '1e-8'):
    advantages_with(f'epsilon {eps} in the denominator', SCALED, f'(rewards - mean) / (std + {eps})')
    advantages_with(f'epsilon {eps} instead of the exact test', EXACT, f'(rewards - mean) / (std + {eps})')
advantages_with('standard deviation clamped', EXACT, '(rewards - mean) / std.clamp(min=1e-8)')
advantages_with('a group of one gets NaN', 'return torch.zeros_like(rewards)', 'return 0. * rewards / 0.')
advantages_with('a group of one keeps its reward', 'return torch.zeros_like(rewards)', 'return rewards')
advantages_with('leave-one-out baseline', SCALED, '(rewards - (mean*rewards.shape[-1] - rewards)/(rewards.shape[-1] - 1)) / std')
advantages_with('median instead of mean', MEAN, 'rewards.median(-1, keepdim=True).values')
advantages_with('failures are not pushed down', SCALED, '((rewards - mean) / std).clamp(min=0)')
advantages_with('clipped to [-1, 1]', SCALED, '((rewards - mean) / std).clamp(-1, 1)')
advantages_with('scaled to [-1, 1]', SCALED, '2*(rewards - rewards.amin(-1, True))/(rewards.amax(-1, True) - rewards.amin(-1, True)) - 1')
advantages_with('mean absolute deviation', STD, '(rewards - rewards.mean(-1, True)).abs().mean(-1, True)')
advantages_with('softmax of the rewards', SCALED, 'rewards.softmax(-1) - 1/rewards.shape[-1]')
advantages_with('rewards changed in place', 'return torch.where(dead, 0., (rewards - mean) / std)',
                'rewards -= mean\n    return torch.where(dead, 0., rewards / std)', says='your function changes the rewards')
advantages_with('anything accepted', 'if not rewards.isfinite().all()', 'if False', says='must be refused with a ValueError')
advantages_with('refused only if all are NaN', 'not rewards.isfinite().all()', 'rewards.isnan().all()')
advantages_with('NaN refused, infinity accepted', 'not rewards.isfinite().all()', 'rewards.isnan().any()')
advantages_with('NaN read as a failure', "raise ValueError('rewards must be finite')", 'rewards = rewards.nan_to_num(0., 1., 0.)')
advantages_with('rounded to float32', 'mean, std', 'rewards = rewards.float(); mean, std')


def scorer_with(*args, **kwargs): mistake('completion_log_prob', *args, **kwargs)

SLICE, SUM, TARGETS = '[:, prompt_len-1:-1]', 'logp.sum(-1)', 'ids[:, prompt_len:]'
TERMS, MASKED = 'logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]', 'if mask is not None: logp = logp * mask'
scorer_with('position t scores token t', SLICE, '[:, prompt_len:]', says='yours are compared with token t\n')
scorer_with('position t scores token t+2', SLICE, '[:, prompt_len-2:-2]', says='yours are compared with token t+2')
scorer_with('prompt included', SLICE, '[:, :-1]', TARGETS, 'ids[:, 1:]',
            MASKED, 'if mask is not None: logp = logp * F.pad(mask, (prompt_len-1, 0), value=True)',
            says='your log-prob changes when a prompt token changes')
scorer_with('last prompt token included', SLICE, '[:, prompt_len-2:-1]', TARGETS, 'ids[:, prompt_len-1:]',
            MASKED, 'if mask is not None: logp = logp * F.pad(mask, (1, 0), value=True)', says='the last prompt token is in your sum')
scorer_with('first completion token left out', SUM, 'logp[:, 1:].sum(-1)', says='the first completion token is not in your sum')
scorer_with('last column left out', SUM, 'logp[:, :-1].sum(-1)')
scorer_with('last token of each completion left out', MASKED, 'if mask is not None: logp = logp * F.pad(mask, (0, 1))[:, 1:]',
            says='the last completion token is not in your sum')
scorer_with('mask late by one', MASKED, 'if mask is not None: logp = logp * F.pad(mask, (1, 0), value=True)[:, :-1]')
scorer_with('mask dropped', MASKED, '', says='your log-prob changes when the padding changes')
scorer_with('mask inverted', '* mask', '* ~mask', says='your mask is inverted')
scorer_with('mask taken from pad ids', MASKED, 'logp = logp * (targets != 5)', says='you have lost the end-of-sequence token')
scorer_with('mask guessed from pad ids when none is given', MASKED, 'logp = logp * (mask if mask is not None else targets != 5)')
scorer_with('mask up to the first EOS', MASKED, 'logp = logp * (((targets == 5).cumsum(1) - (targets == 5).int()) == 0)')
scorer_with('mask read as lengths', '* mask', '* (torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True))')
scorer_with('mask of the first row for all', '* mask', '* mask[:1]')
scorer_with('EOS left out', '* mask', '* mask * (targets != 5)', says='the end-of-sequence token is not in your sum')
scorer_with('mean instead of sum', SUM, 'logp.sum(-1) / (logp != 0).sum(-1)', says='yours is their mean')
scorer_with('mean over padding too', SUM, 'logp.mean(-1)', says='yours is their mean, padding included')
scorer_with('sum over the batch', SUM, 'logp.sum()')
scorer_with('the likeliest token instead of the chosen one', TERMS, 'logits.log_softmax(-1).amax(-1)')
scorer_with('logits without the normalizer', 'logits.log_softmax(-1)', 'logits', says='these are logits')
scorer_with('probabilities without the logarithm', 'log_softmax', 'softmax', says='these are probabilities')
scorer_with('product of probabilities', SUM, 'logp.sum(-1).exp()')
scorer_with('sign flipped', SUM, '-logp.sum(-1)', says='a log-prob is negative')
scorer_with('normalized over positions', 'log_softmax(-1)', 'log_softmax(1)', says='normalize over the vocabulary')
scorer_with('normalized over the batch', 'log_softmax(-1)', 'log_softmax(0)')
scorer_with('a temperature of its own', '.float()', '.float() / .7')
scorer_with('logits clipped', '.float()', '.float().clamp(-1, 1)')
scorer_with('only the top 3 tokens count', '.float()',
            '.float()\n    logits = logits.masked_fill(logits < logits.topk(3).values[..., -1:], -1e9)')
scorer_with('pad token taken from the vocabulary', '.float()', '.float()[..., :5]', TARGETS, 'ids[:, prompt_len:].clamp(max=4)')
scorer_with('half precision', '.float()', '', says='compute in float32')
scorer_with('no gradient', SUM, 'logp.sum(-1).detach()', says='carries no gradient')
scorer_with('gradient of the first token only', SUM, 'logp[:, 0] + logp[:, 1:].sum(-1).detach()')
scorer_with('gradient to the chosen logit only', TERMS, 'logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1).detach()')
scorer_with('the prompt is not shown to the model', 'model(ids)[:, prompt_len-1:-1]', 'model(ids[:, prompt_len-1:])[:, :-1]',
            says='show the model all of it')
scorer_with('only the last token counts', SUM, 'logp[:, -1]')
scorer_with('scored in training mode', '    logits = ', '    model.train()\n    logits = ')
scorer_with('leaves the model in evaluation mode', '    logits = ', '    model.eval()\n    logits = ',
          says='your log-prob changes the mode')
scorer_with('squeezes once too often', '[..., 0]', '.squeeze()')


def loss_with(*args, **kwargs): mistake('grpo_loss', *args, **kwargs)

POLICY, LEASH = '-(advantages.detach() * logp).mean()', 'kl_coef * kl.mean()'
KL = 'near.exp() - near - 1 + (near.detach().exp() - 1) * (d - near)'
loss_with('sign of the policy term flipped', '-(adv', '(adv', says='your loss pushes good completions down')
loss_with('sign of the leash flipped', '+ kl_coef', '- kl_coef', says='your leash pushes away from the reference')
loss_with('everything negated', POLICY + ' + ' + LEASH, f'-({POLICY} + {LEASH})')
loss_with('policy and reference swapped', 'ref_logp.detach() - logp', 'logp - ref_logp.detach()',
          says='your KL has policy and reference swapped')
loss_with('k1', KL, '-d', says='this is k1')
loss_with('k1 swapped', KL, 'd')
loss_with('k2', KL, 'd**2 / 2', says='this is k2')
loss_with('absolute difference', KL, 'd.abs()', says='this is the absolute difference')
loss_with('the ratio alone', KL, 'near.exp()')
loss_with('k3 without its -1', 'near.exp() - near - 1 +', 'near.exp() - near +', says='the leash has lost its -1')
loss_with('k3 without its -d', 'near.exp() - near - 1 +', 'near.exp() - 1 +')
loss_with('k3 overflows', KL, 'd.exp() - d - 1', says='float32 holds exp(x)')
loss_with('k3 overflows, with expm1', KL, 'd.expm1() - d', says='float32 holds exp(x)')
loss_with('overflow selected away', KL, 'torch.where(d < 20, d.exp() - d - 1, d)', says='still spoils the gradient')
loss_with('overflow patched over', KL, '(d.exp() - d - 1).nan_to_num(0., 1e9)')
loss_with('difference clamped', KL, 'near.exp() - near - 1', says='a leash that is clamped does not pull')
loss_with('difference clamped on both sides', 'd.clamp(max=20)', 'd.clamp(-10, 10)', KL, 'near.exp() - near - 1')
loss_with('estimate clamped', KL, '(near.exp() - near - 1).clamp(max=10)')
loss_with('clamped close to 0', 'd.clamp(max=20)', 'd.clamp(max=1)')
loss_with('leash without gradient', LEASH, 'kl_coef * kl.mean().detach()', says='the leash does not pull')
loss_with('leash forgotten', ' + ' + LEASH, '')
loss_with('leash of fixed strength', 'kl_coef * kl', '.05 * kl')
loss_with('leash multiplied in', '+ kl_coef * kl.mean()', '* (1 + kl_coef * kl.mean())')
loss_with('policy term weighed down', POLICY, '(1 - kl_coef) * ' + POLICY)
loss_with('reference with gradient', 'ref_logp.detach()', 'ref_logp', says='a gradient reaches the reference')
loss_with('gradient through the reference instead of the policy', 'ref_logp.detach() - logp', 'ref_logp - logp.detach()')
loss_with('advantage not detached', 'advantages.detach()', 'advantages', says='a gradient reaches the advantages')
loss_with('policy term without gradient', '* logp)', '* logp.detach())', says='the advantages do not push')
loss_with('sum instead of mean', POLICY, '-(advantages.detach() * logp).sum()', LEASH, 'kl_coef * kl.sum()',
          says='take the mean over the completions')
loss_with('sum of the leash', LEASH, 'kl_coef * kl.sum()', says='take the mean of the KL')
loss_with('divided by K-1', POLICY, '-(advantages.detach() * logp).sum() / (len(logp) - 1)')
loss_with('mean over the successes only', POLICY, '-(advantages.detach() * logp)[advantages > 0].mean()')
loss_with('mean times mean', POLICY, '-advantages.detach().mean() * logp.mean()')
loss_with('advantages normalized again', 'd = ref',
          'advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)\n    d = ref')
loss_with('size of the advantage lost', 'advantages.detach() *', 'advantages.detach().sign() *')
loss_with('probability instead of log-probability', '* logp)', '* logp.exp())')
loss_with('ratio to itself', '* logp)', '* (logp - logp.detach()).exp())')
loss_with('log-ratio instead of log-probability', '* logp)', '* (logp - ref_logp))')
loss_with('no reduction', ').mean() + ', ') + ')


def step_with(*args, **kwargs): mistake('train_step', *args, **kwargs)

LIVE, TASKS = '[i for i,r in enumerate(rewards) if r.max() > r.min()]', '[self.make_task(self.rng) for _ in range(self.groups_per_step)]'
SAMPLE = 'sample_groups(self.model, self.tokenizer, [task.prompt for task in tasks], self.k, self.max_new_tokens, self.generator)'
REWARDS = '[[score(self.verifier, task, c) for c in g.completions] for task,g in zip(tasks, groups)]'
SCORE, REF = 'completion_log_prob(self.model, g.ids, g.prompt_len, g.mask)', 'completion_log_prob(reference, g.ids, g.prompt_len, g.mask)'
RETURN, NORM = 'return record(groups, rewards)\n', 'grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)'
step_with('zero_grad forgotten', 'self.optimizer.zero_grad()', 'pass', says='the gradient of an earlier step is still in there')
step_with('zero_grad after backward', 'loss.backward()', 'loss.backward(); self.optimizer.zero_grad()')
step_with('optimizer step forgotten', '        self.optimizer.step()\n', '', says='the adapters did not take the step')
step_with('optimizer step before backward', 'loss.backward()', 'pass', 'self.optimizer.step()', 'self.optimizer.step(); loss.backward()')
step_with('two optimizer steps', 'self.optimizer.step()', 'self.optimizer.step(); self.optimizer.step()')
step_with('ascent', 'loss.backward()', '(-loss).backward()')
step_with('clipping forgotten', NORM, "grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, float('inf'))")
step_with('clipped to 1', 'self.max_grad_norm', '1.')
step_with('norm measured after clipping', NORM, f'{NORM}\n        grad_norm = torch.stack([p.grad.norm() for p in self.parameters]).norm()',
          says='yours is the length after it')
step_with('a dead batch is stepped on', RETURN,
          'self.optimizer.zero_grad(set_to_none=False); self.optimizer.step(); ' + RETURN,
          says='must not move the policy')
step_with('a dead batch is pulled by the leash', LIVE, 'list(range(len(tasks)))')
step_with('a dead batch decays the weights', RETURN, '[p.data.mul_(.999) for p in self.parameters]; ' + RETURN)
step_with('a dead batch resets the optimizer', RETURN, 'self.optimizer.state.clear(); ' + RETURN,
          says='must not touch the optimizer')
step_with('a dead batch is scored', 'if not live:',
          f'with self.frozen() as reference: [{REF} for g in groups]\n        if not live:', says='is not scored')
step_with('a batch with one dead group is skipped', 'if not live:', 'if len(live) < len(tasks):')
step_with('dead judged by the standard deviation', 'if r.max() > r.min()', 'if r.std() > 0')
step_with('dead judged by the mean', 'if r.max() > r.min()', 'if 0 < r.mean() < 1')
step_with('a dead group dilutes the live one', 'torch.stack(losses).mean()', 'torch.stack(losses).sum() / len(tasks)',
          says='must not dilute')
step_with('loss summed over groups', 'torch.stack(losses).mean()', 'torch.stack(losses).sum()', says='take the mean over the live groups')
step_with('only the last group is learned from', 'torch.stack(losses).mean()', 'losses[-1]')
step_with('only the first group is learned from', 'for i in live', 'for i in live[:1]')
step_with('zero instead of NaN', RETURN, 'return record(groups, rewards, 0., 0., 0.)\n', says='would be a false measurement')
step_with('a dead batch counts as an update', RETURN, 'return record(groups, rewards, updated=1.)\n')
step_with('nothing is reported', RETURN, 'return {}\n')
step_with('reward in place of advantage', 'advantages[i]', 'rewards[i]')
step_with('advantages of the whole batch', 'group_advantages(rewards)', 'group_advantages(rewards.flatten()).view_as(rewards)')
step_with('advantages of the first group for all', 'advantages[i]', 'advantages[live[0]]')
step_with('advantages of the wrong group', 'advantages[i]', 'advantages[-1 - i]')
step_with('stale samples', f'groups = {SAMPLE}', f'self.old = groups = getattr(self, "old", None) or {SAMPLE}',
          'tasks = [', 'self.old_tasks = tasks = getattr(self, "old_tasks", None) or [')
step_with('samples one step old', 'self.batch =', f'groups, self.old = getattr(self, "old", groups), {SAMPLE}\n        self.batch =')
step_with('update before sampling', '        tasks = [', '        if self.batch: self.optimizer.step()\n        tasks = [')
step_with('sampled from the reference', f'groups = {SAMPLE}', f'\n        with adapters_off(self.model): groups = {SAMPLE}')
step_with('sampled in training mode', f'groups = {SAMPLE}', 'self.model.eval = self.model.train; '
          f'groups = {SAMPLE}; del self.model.eval; self.model.eval()')
COOL = 'cool = self.model.head.register_forward_hook(lambda m, i, logits: logits / .7); '
step_with('sampled at a temperature of its own', f'groups = {SAMPLE}', COOL + f'groups = {SAMPLE}; cool.remove()')
step_with('scored at a temperature of its own', f'logp = {SCORE}', COOL + f'logp = {SCORE}; cool.remove()')
step_with('global random numbers', 'self.max_new_tokens, self.generator)', 'self.max_new_tokens)', says='draw with self.generator')
step_with('the same random numbers in every step', ' self.generator)', ' self.generator.manual_seed(0))')
step_with('the same task in every step', '        tasks = [', '        self.rng.seed(0)\n        tasks = [')
step_with('one task for all groups', TASKS, '[self.make_task(self.rng)] * self.groups_per_step',
          says='each step draws groups_per_step new tasks')
step_with('one group only', 'range(self.groups_per_step)', 'range(1)')
step_with("the wrong task's verifier", 'score(self.verifier, task, c)', 'score(self.verifier, tasks[0], c)',
          says='with the task that it answers')
step_with('rewards of the groups mixed up', REWARDS, REWARDS + ').T.reshape(len(groups), -1', says='with the task that it answers')
step_with('verifier sees prompt and completion', 'task, c)', 'task, task.prompt + c)')
step_with('verifier judges the first completion for all', 'task, c)', 'task, g.completions[0])')
step_with('verifier errors count as failures', 'rewards = torch',
          'def score(verifier, task, c):\n            try: return verifier(task, c)\n            except Exception: return 0.\n        rewards = torch',
          says='a verifier that fails must stop the step')
step_with('dropout while scoring', 'logp = ' + SCORE, 'self.model.train(); logp = ' + SCORE)
step_with('training mode left on', 'with eval_mode(self.model):', 'if True:')
step_with('mode not restored', 'with eval_mode(self.model):', 'if self.model.eval():', says='in another mode')
step_with('always left in training mode', 'with eval_mode(self.model):', 'if self.model.eval():', RETURN, 'self.model.train(); ' + RETURN,
          'self.optimizer.step()', 'self.optimizer.step(); self.model.train(); self.model.embed.eval()', says='in another mode')
step_with('reference is the current policy', 'with self.frozen() as reference:', 'with torch.no_grad():', REF, SCORE,
          says='you compare the policy with itself')
step_with('reference in training mode', 'with self.frozen() as reference:',
          'with torch.no_grad(), adapters_off(self.model):\n                reference = self.reference or self.model; reference.train()')
step_with('reference given is ignored', 'with self.frozen() as reference:', 'with torch.no_grad(), adapters_off(self.model) as reference:')
step_with('reference left in evaluation mode', 'with self.frozen() as reference:', 'if self.reference: self.reference.eval()\n            '
          'with self.frozen() as reference:', says='the reference has changed')
step_with('adapters left off', 'with self.frozen() as reference:', 'reference = self.reference or self.model\n            '
          'for m in self.model.modules(): m.enabled = False\n            with torch.no_grad():')
step_with('reference scored without a mask', REF, 'completion_log_prob(reference, g.ids, g.prompt_len)')
step_with('policy scored without a mask', SCORE, 'completion_log_prob(self.model, g.ids, g.prompt_len)')
step_with('prompt scored too', SCORE, 'completion_log_prob(self.model, g.ids, 1)')
step_with('prompt length of the first group for all', SCORE, 'completion_log_prob(self.model, g.ids, groups[0].prompt_len, g.mask)')
step_with('leash forgotten', 'self.kl_coef', '0.')
step_with('leash of a default strength', 'self.kl_coef', '.05')
step_with('leash measured after the update', 'self.optimizer.step()', 'self.optimizer.step(); '
          f'kl = torch.stack([kl_estimate({SCORE.replace("g.", "groups[i].")}.detach(), ref_logp).mean() for i in live[-1:]]).mean()')
step_with('leash of the last group only', 'torch.stack(kls).mean()', 'kls[-1]')
step_with('leash diluted by dead groups', 'torch.stack(kls).mean()', 'torch.stack(kls).sum() / len(tasks)')
step_with('everything is trained', 'self.optimizer.step()', 'self.optimizer.step(); self.model.embed.weight.data.add_(1e-3)',
          says='a frozen parameter has moved')
step_with('batch not kept', '        self.batch = tasks, groups, rewards, advantages\n', '', says='self.batch keeps')


# ---------- right, and written differently

def implementation(**functions):
    "The namespace that the tests take: these functions, and the solutions for the others"
    step = functions.pop('train_step', GRPOTrainer.train_step)
    return SimpleNamespace(**SOLUTIONS | functions, GRPOTrainer=type('Trainer', (GRPOTrainer,), dict(train_step=step)))


def advantages_by_loop(rewards):
    if rewards.dim() > 1: return torch.stack([advantages_by_loop(row) for row in rewards])
    r = rewards.tolist()
    if any(x != x or abs(x) == float('inf') for x in r): raise ValueError(f'rewards must be finite: {r}')
    if len(set(r)) == 1: return torch.zeros_like(rewards)
    return torch.tensor([(x - mean(r)) / stdev(r) for x in r], dtype=rewards.dtype)


def log_prob_by_loop(model, ids, prompt_len, mask=None):
    total = []
    for i,row in enumerate(ids):
        logits, terms = model(row[None])[0].float(), []
        for t in range(prompt_len, len(row)):
            if mask is None or mask[i, t-prompt_len]: terms.append(logits[t-1, row[t]] - logits[t-1].logsumexp(0))
        total.append(sum(terms))
    return torch.stack(total)


def loss_by_loop(logp, ref_logp, advantages, kl_coef):
    loss = 0.
    for i in range(len(logp)):
        d = ref_logp[i].item() - logp[i]
        k3 = torch.exp(d) - d - 1 if d < 40 else (d - 40)*2.**50 + 2.**57
        loss = loss - advantages[i].item()*logp[i] + kl_coef*k3
    return loss / len(logp)


def step_by_step(self):
    "One group after another, and gradients that add up"
    modes = {m: m.training for m in self.model.modules()}
    self.model.eval()
    try:
        self.optimizer.zero_grad(set_to_none=False)
        tasks, groups, rewards = [], [], []
        for _ in range(self.groups_per_step): tasks.append(self.make_task(self.rng))
        for task in tasks:
            groups += sample_groups(self.model, self.tokenizer, [task.prompt], self.k, self.max_new_tokens, self.generator)
            rewards.append([score(self.verifier, task, c) for c in groups[-1].completions])
        live = [i for i,r in enumerate(rewards) if len(set(r)) > 1]
        advantages, total, kl = [group_advantages(torch.tensor(r)) for r in rewards], 0., 0.
        for i in live:
            ids, start, mask = groups[i].ids, groups[i].prompt_len, groups[i].mask
            with self.frozen() as base: ref_logp = completion_log_prob(base, ids, start, mask)
            loss = grpo_loss(completion_log_prob(self.model, ids, start, mask), ref_logp, advantages[i], self.kl_coef) / len(live)
            loss.backward()
            total, kl = total + loss.item(), kl + kl_estimate(groups[i].logp, ref_logp).mean().item() / len(live)
        self.batch = tasks, groups, torch.tensor(rewards), torch.stack(advantages)
        if not live: return record(groups, self.batch[2])
        norm = sum((p.grad**2).sum() for p in self.parameters)**.5
        for p in self.parameters: p.grad *= min(1., self.max_grad_norm / norm)
        self.optimizer.step()
        return record(groups, self.batch[2], total, kl, norm.item(), 1.)
    finally:
        for m,mode in modes.items(): m.training = mode


def advantages_in_double(rewards):
    if not torch.isfinite(rewards).all(): raise ValueError(f'not finite: {rewards}')
    r = rewards.double()
    centred = r - r.mean(-1, keepdim=True)
    spread = (centred.square().sum(-1, keepdim=True) / max(r.shape[-1] - 1, 1)).sqrt()
    alike = (rewards == rewards[..., :1]).all(-1, keepdim=True)
    return (centred / spread.where(~alike, 1.)).where(~alike, 0.).to(rewards.dtype)


def log_prob_by_cross_entropy(model, ids, prompt_len, mask=None):
    targets = ids[:, 1:].clone()
    targets[:, :prompt_len-1] = -100
    if mask is not None: targets[:, prompt_len-1:].masked_fill_(~mask, -100)
    return -F.cross_entropy(model(ids)[:, :-1].float().transpose(1, 2), targets, reduction='none').sum(1)


def loss_in_double(logp, ref_logp, advantages, kl_coef):
    d = ref_logp.detach().double() - logp.double()
    far = d > 25
    k3 = torch.where(far, torch.e**25 * (d - 24) - d - 1, torch.where(far, 0., d).expm1() - d)
    return (kl_coef*k3 - advantages.detach()*logp).mean().to(logp.dtype)


def step_at_once(self):
    "One loss over the completions of all live groups: they have K each, so the mean over them is the mean over groups"
    with eval_mode(self.model):
        tasks = [self.make_task(self.rng) for _ in range(self.groups_per_step)]
        groups = sample_groups(self.model, self.tokenizer, [t.prompt for t in tasks], self.k, self.max_new_tokens, self.generator)
        rewards = torch.tensor([[score(self.verifier, t, c) for c in g.completions] for t,g in zip(tasks, groups)])
        self.batch = tasks, groups, rewards, group_advantages(rewards)
        live = self.batch[3].any(-1)
        if not live.any(): return record(groups, rewards)
        scored = [g for g,ok in zip(groups, live) if ok]
        logp = torch.cat([completion_log_prob(self.model, g.ids, g.prompt_len, g.mask) for g in scored])
        with self.frozen() as base: ref_logp = torch.cat([completion_log_prob(base, g.ids, g.prompt_len, g.mask) for g in scored])
        loss = grpo_loss(logp, ref_logp, self.batch[3][live].flatten(), self.kl_coef)
        for p,g in zip(self.parameters, torch.autograd.grad(loss, self.parameters)): p.grad = g
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()
    return record(groups, rewards, loss.item(), kl_estimate(logp.detach(), ref_logp).mean().item(), norm.item(), 1.)


CORRECT = dict(
    package=implementation(),
    plain=implementation(**{f.__name__: f for f in (group_advantages, completion_log_prob, grpo_loss, train_step)}),
    loops=implementation(group_advantages=advantages_by_loop, completion_log_prob=log_prob_by_loop, grpo_loss=loss_by_loop,
                         train_step=step_by_step),
    double=implementation(group_advantages=advantages_in_double, completion_log_prob=log_prob_by_cross_entropy, grpo_loss=loss_in_double,
                          train_step=step_at_once))


# ---------- putting the tests to them

WORDS = dict(group_advantages='advantages', completion_log_prob='log_prob', grpo_loss='grpo_loss', train_step='train_step')
ALL = {name: test for name,test in vars(test_rl).items() if name.startswith('test_')}
ASKED = {name: test for name,test in ALL.items() if 'rl' in inspect.signature(test).parameters}


def own_tests(function): return {name: test for name,test in ASKED.items() if name.startswith(f'test_{WORDS[function]}_')}


def failures(rl, tests, first=False):
    "The tests that fail, in order, with what they say; with `first` only the first of them"
    found = {}
    for name,test in tests.items():
        try: test(rl)
        except Exception as e: found[name] = str(e) if isinstance(e, AssertionError) else f'{type(e).__name__}: {e}'
        if first and found: break
    return found


def verdict(m, first=False): return failures(implementation(**{m.function: m.wrong}), own_tests(m.function), first)


def test_there_are_22(): assert (len(ALL), len(ASKED), [len(own_tests(f)) for f in WORDS]) == (22, 14, [4, 4, 3, 3])


@pytest.mark.parametrize('name', CORRECT)
def test_correct_implementations_pass(name):
    assert failures(CORRECT[name], ASKED) == {}
    for given in ALL.keys() - ASKED.keys(): ALL[given]()


def test_catalogue_is_large():
    assert len({str(m) for m in CATALOGUE}) == len(CATALOGUE) >= 45
    assert {m.function for m in CATALOGUE} == WORDS.keys()


@pytest.mark.parametrize('m', CATALOGUE, ids=str)
def test_mistake_is_found(m):
    found = verdict(m, first=not m.says)
    assert found, f'no test of {m.function} notices this: {m.what}'
    assert any(m.says in words for words in found.values()), f'nobody says "{m.says}", but\n' + '\n'.join(found.values())


LIKELY = """group_advantages: divided by K instead of K-1
    group_advantages: statistics of the whole batch
    group_advantages: dead judged by std == 0
    completion_log_prob: position t scores token t
    completion_log_prob: prompt included
    completion_log_prob: mask dropped
    completion_log_prob: mask taken from pad ids
    grpo_loss: sign of the policy term flipped
    grpo_loss: policy and reference swapped
    grpo_loss: k3 overflows
    train_step: zero_grad forgotten
    train_step: a dead batch is stepped on
    train_step: zero instead of NaN
    train_step: reference is the current policy"""


def test_likely_mistakes_have_words_of_their_own():
    likely = [line.strip() for line in LIKELY.splitlines()]
    chosen = {str(m): m for m in CATALOGUE if str(m) in likely}
    assert len(chosen) == len(likely) >= 10 and all(m.says for m in chosen.values())     # `test_mistake_is_found` checks that it is said
    headlines = [next(iter(verdict(m, first=True).values())).splitlines()[0] for m in chosen.values()]
    assert len(set(headlines)) == len(headlines), 'two of these mistakes are met by the same words'


def blank(*args, **kwargs): raise NotImplementedError


@pytest.mark.parametrize('function', WORDS)
def test_a_function_alone_turns_its_own_tests_green(function):
    scope = dict(globals()) | {name: blank for name in WORDS}       # a learner's module, with everything still to do
    def failing(): return failures(implementation(**{name: scope[name] for name in WORDS}), ASKED).keys()
    assert failing() == ASKED.keys()
    exec(inspect.getsource(globals()[function]), scope)
    assert failing() == ASKED.keys() - own_tests(function).keys()
