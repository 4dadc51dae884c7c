# SPDX-License-Identifier: Apache-2.0
"""NumPyro's step in step_speed.py: the same network in plain JAX, in a whole step of SVI that XLA compiles."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["numpyro_step"]


def numpyro_step(guide: str, num_data: int, lr: float) -> Callable[[nn.Module], Callable]:
    """A step of SVI with one of NumPyro's guides; priors, likelihood and first weights are those of Pyro's models."""

    def make(net: nn.Module) -> Callable[[Tensor, Tensor], object]:
        import jax
        import numpyro
        from numpyro import distributions as dist
        from numpyro.infer import SVI, Trace_ELBO, autoguide, init_to_value

        weights = {name: jax.numpy.asarray(p.detach().cpu().numpy()) for name, p in net.named_parameters()}

        def model(x: Any, y: Any) -> None:
            drawn = {
                name: numpyro.sample(name, dist.Normal(0.0, 1.0).expand(w.shape).to_event(w.ndim))
                for name, w in weights.items()
            }
            with numpyro.plate("data", num_data, subsample_size=len(x)):
                numpyro.sample("obs", dist.Categorical(logits=forward(net, drawn, x)), obs=y)

        options = {"init_scale": 0.01} if guide == "AutoNormal" else {}
        chosen = getattr(autoguide, guide)(model, init_loc_fn=init_to_value(values=weights), **options)
        svi = SVI(model, chosen, numpyro.optim.Adam(lr), Trace_ELBO())
        update, state, known = jax.jit(svi.update), None, {}

        def step(x: Tensor, y: Tensor) -> object:
            nonlocal state
            if state is None:
                known["data"] = [jax.numpy.asarray(tensor.cpu().numpy()) for tensor in (x, y)]
                state = svi.init(jax.random.key(0), *known["data"])
            state, loss = update(state, *known["data"])
            return float(loss)  # when it is there, the weights are, too

        return step

    return make


def forward(net: nn.Module, weights: dict[str, Any], x: Any) -> Any:
    """Outputs of a sequential network of torch, by JAX.

    Raises:
        NotImplementedError: for a layer that the networks of the benchmark have not.
    """
    import jax

    for name, layer in net.named_children():
        if isinstance(layer, nn.Flatten):
            x = x.reshape(len(x), -1)
        elif isinstance(layer, nn.ReLU):
            x = jax.nn.relu(x)
        elif isinstance(layer, nn.Linear):
            x = x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        elif isinstance(layer, nn.Conv2d):
            padding = [(size, size) for size in layer.padding]
            x = jax.lax.conv_general_dilated(x, weights[f"{name}.weight"], layer.stride, padding)
            x = x + weights[f"{name}.bias"][:, None, None]
        elif isinstance(layer, nn.MaxPool2d):
            window = (1, 1, layer.kernel_size, layer.kernel_size)
            x = jax.lax.reduce_window(x, -jax.numpy.inf, jax.lax.max, window, window, "VALID")
        else:
            raise NotImplementedError(f"{type(layer).__name__} in JAX")
    return x
