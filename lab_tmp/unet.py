import torch, lzma, numpy as np, time, sys
from diffusers import UNet2DModel
def cifar(path):
    raw = lzma.open(path).read() if path.endswith('xz') else open(path,'rb').read()
    d = np.frombuffer(raw, dtype=np.uint8).reshape(-1,3073)
    return torch.from_numpy(d[:,1:].reshape(-1,3,32,32).copy()).float()/127.5-1
def big():
    return UNet2DModel(sample_size=32,in_channels=3,out_channels=3,center_input_sample=False,time_embedding_type="positional",
      freq_shift=1,flip_sin_to_cos=False,down_block_types=("DownBlock2D","AttnDownBlock2D","DownBlock2D","DownBlock2D"),
      up_block_types=("UpBlock2D","UpBlock2D","AttnUpBlock2D","UpBlock2D"),block_out_channels=(128,256,256,256),layers_per_block=2,
      mid_block_scale_factor=1,downsample_padding=0,act_fn="silu",attention_head_dim=None,norm_num_groups=32,norm_eps=1e-6)
def small():
    return UNet2DModel(sample_size=32,in_channels=3,out_channels=3,down_block_types=("DownBlock2D","DownBlock2D","AttnDownBlock2D"),
      up_block_types=("AttnUpBlock2D","UpBlock2D","UpBlock2D"),block_out_channels=(32,64,64),layers_per_block=1,norm_num_groups=8,freq_shift=1,flip_sin_to_cos=False,attention_head_dim=None)
def train(net, data, seconds, batch, lr, dev, bf16):
    betas=torch.linspace(1e-4,0.02,1000,dtype=torch.float64); ab=(1-betas).cumprod(0).float().to(dev)
    opt=torch.optim.AdamW(net.parameters(),lr=lr,fused=dev=='cuda'); t0=time.time(); n=0; losses=[]
    data=data.to(dev); net.train()
    while time.time()-t0<seconds:
        x=data[torch.randint(len(data),(batch,),device=dev)]
        x=torch.where(torch.rand(batch,1,1,1,device=dev)<.5,x,x.flip(-1))
        t=torch.randint(1000,(batch,),device=dev); e=torch.randn_like(x); a=ab[t].view(-1,1,1,1)
        with torch.autocast(dev,torch.bfloat16,enabled=bf16):
            out=net(a.sqrt()*x+(1-a).sqrt()*e,t).sample
        loss=(out.float()-e).square().mean()
        opt.zero_grad(set_to_none=True); loss.backward(); torch.nn.utils.clip_grad_norm_(net.parameters(),1.0); opt.step(); n+=1
        for g in opt.param_groups: g['lr']=lr*min(1,n/100)*max(0.05,1-((time.time()-t0)/seconds))
        if n%10==0: losses.append(loss.item())
        if n%100==0: print(n, sum(losses[-10:])/10, time.time()-t0, flush=True)
    net.eval(); return n, sum(losses[-20:])/20
if __name__=="__main__":
    torch.manual_seed(0); torch.set_num_threads(2); net=small(); print(sum(p.numel() for p in net.parameters()))
    d=cifar('/work/shared/data/cifar-10-batches-bin/data_batch_1.bin.xz')
    print(train(net,d,float(sys.argv[1]),32,1e-3,'cpu',False)); torch.save(net.state_dict(),'small.pt')
