def load(model, folder): raise NotImplementedError
def save(model, tok, folder): raise NotImplementedError
