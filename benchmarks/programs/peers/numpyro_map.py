# SPDX-License-Identifier: Apache-2.0
"""The most probable weights with NumPyro."""

import numpyro
import numpyro.distributions as dist
from jax import numpy as jnp, random
from jax.scipy.special import logsumexp
from numpyro.infer import SVI, Trace_ELBO, log_likelihood
from numpyro.infer.autoguide import AutoDelta

from benchmarks.programs.task import EPOCHS, test_arrays, train_arrays


def model(x, y=None):
    first = numpyro.sample("first", dist.Normal(0, 1).expand([2, 20]).to_event(2))
    shift = numpyro.sample("shift", dist.Normal(0, 1).expand([20]).to_event(1))
    last = numpyro.sample("last", dist.Normal(0, 1).expand([20, 3]).to_event(2))
    bias = numpyro.sample("bias", dist.Normal(0, 1).expand([3]).to_event(1))
    logits = jnp.tanh(x @ first + shift) @ last + bias
    with numpyro.plate("data", len(x)):
        numpyro.sample("obs", dist.Categorical(logits=logits), obs=y)


guide = AutoDelta(model)
svi = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
result = svi.run(random.key(0), 4 * EPOCHS, *train_arrays, progress_bar=False)
weights = guide.sample_posterior(random.key(1), result.params, sample_shape=(30,))
scores = log_likelihood(model, weights, *test_arrays)["obs"]
nll = -(logsumexp(scores, 0) - jnp.log(30)).mean()
