"""Right and wrong hooks of users, for test_hook.py and wrong_hooks.yaml."""

from __future__ import annotations

from exp.hooks.hook import Hook


class Probe(Hook):
    def setup(self, network):
        self.seen = {}

    def forward(self, name, module, inputs, output):
        self.seen[f"probe/forward/{name}"] = output.float().square().mean()

    def tensor_gradient(self, name, gradient):
        self.seen[f"probe/gradient/{name}"] = gradient.float().norm() / self.loss_scale

    def full_backward(self, name, module, grad_inputs, grad_outputs):
        self.seen[f"probe/backward/{name}"] = grad_inputs[0].float().norm() / self.loss_scale

    def after_step(self, step):
        # Combine the values of the ranks, which have equally many samples.
        count = len(step.gather(step.loss))
        found = {}
        for tag, value in self.seen.items():
            every = step.gather(value)
            # The loss of a rank is the mean over its samples, so its gradients are `count` times as large.
            found[tag] = every.mean() if "forward" in tag else (every / count).square().sum().sqrt()
        return found


class Deaf(Hook):
    transforms = True

    def full_backward(self, name, module, grad_inputs, grad_outputs):
        return grad_inputs


class Mistyped(Hook):
    needs = frozenset({"whole_parameter", "one_thread"})

    def after_step(self, step):
        pass


class Stubborn(Hook):
    needs = frozenset({"one_rank", "float32", "one_batch_a_step"})

    def after_step(self, step):
        pass


class Typo(Hook):
    def after_stepp(self, step):
        pass


class Nothing(Hook):
    pass


class Narrow(Hook):
    def forward(self, name, module, inputs):
        pass


class InPlace(Hook):
    def forward(self, name, module, inputs, output):
        output.mul_(0.5)


class Number(Hook):
    def after_step(self, step):
        return 3.0


class Taken(Hook):
    def after_step(self, step):
        return {"loss/train": 99.0}


class Shared(Hook):
    def after_step(self, step):
        return {"gradients/norm/total": 1.0}


class Twice(Hook):
    def after_backward(self, step):
        return {"twice": 1.0}

    def after_step(self, step):
        return {"twice": 2.0}


class TwoStages(Hook):
    def after_evaluation(self, stage, gather):
        return {"same": 1.0}


class Broken(Hook):
    def after_step(self, step):
        raise KeyError("mine")
